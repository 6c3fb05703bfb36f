"""Measuring tiles: every candidate for a weight and a number of tokens, in a graph, on weights larger than any cache.

Knows products and clocks; the weights of a model and the destination of results are up to the caller.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.attention.decode_attention import decode_attention
from slipstream.kernels.attention.paged_attention import PagedRequests
from slipstream.kernels.attention.rope_cache import NewTokens
from slipstream.kernels.elementwise.rms_norm import add_rms_norm
from slipstream.kernels.elementwise.swiglu import swiglu
from slipstream.kernels.linear.small_linear import Epilogue, Scaled, Tile, column_parts, small_linear
from slipstream.kernels.triton_jit import next_power_of_2
from slipstream.kernels.tuning.tiles import Measured, Weight, default_tile

_ROTATED_BYTES = 256 << 20  # more than any GPU's second-level cache
_MAX_LAUNCHES = 160
_REPEATS = 6
_CONTEXT, _PAGE_SIZE = 256, 16  # of the attention between products
_ROOM_OF_A_WARP = 6144  # numbers that fit its registers
_MAX_ERROR = 2e-2  # of 16-bit products against float32, in norm

Cuts = tuple[tuple[int, int, int, int], ...]

# Rows, columns, warps and stages that were best for some case, by the length of rows and the number of tokens.
_SHORT_FEW: Cuts = ((16, 128, 1, 5), (16, 64, 1, 8), (16, 256, 2, 3), (16, 512, 2, 3), (16, 128, 2, 4))
_SHORT_MANY: Cuts = ((16, 128, 4, 3), (32, 128, 4, 3), (64, 64, 4, 4), (64, 128, 4, 3), (32, 128, 2, 3))
_LONG_FEW: Cuts = ((16, 256, 2, 5), (16, 256, 1, 5), (32, 256, 2, 4), (64, 256, 4, 3), (16, 512, 2, 4))
_LONG_MANY: Cuts = ((64, 128, 4, 4), (128, 64, 4, 4), (64, 64, 4, 5), (128, 64, 8, 4))
_HEAD: Cuts = ((64, 128, 4, 4), (128, 64, 4, 4), (64, 256, 4, 3), (64, 64, 2, 4))


def _in_registers(weight: Weight, num_tokens: int) -> Iterator[Tile]:
    """Weights in registers with all tokens, as far as a warp has room. Few rows leave many sums to the next norm."""
    width, held = next_power_of_2(weight.in_size), 2 if weight.kind == "gated" else 1
    for rows in (2, 4, 8, 16) if weight.kind == "add" else (1, 2, 4, 8, 16):
        for num_warps in (1, 2, 4, 8):
            if rows <= 4 * num_warps and width * (held * rows + num_tokens) <= _ROOM_OF_A_WARP * num_warps:
                yield Tile(0, rows, 0, num_warps, 1)


def _held(weight: Weight, num_tokens: int) -> Iterator[Tile]:
    """Weights in the layout of the tensor cores: all columns at once."""
    size = max(8, next_power_of_2(num_tokens))
    for rows in (16, 32):
        for num_warps in (2, 4, 8):
            if column_parts(weight.in_size, num_warps) is not None:
                yield Tile(size, rows, 0, num_warps, 1)


def candidates(weight: Weight, num_tokens: int) -> Iterator[Tile]:
    """For 16-bit weights only: others are for tests."""
    is_short, late = weight.in_size <= 2048, weight.num_bytes > 8 << 20
    if num_tokens <= 8 and is_short and weight.kind != "head":
        yield from _in_registers(weight, num_tokens)
    if 1 < num_tokens <= 16 and is_short and weight.kind != "head":
        yield from _held(weight, num_tokens)
    tokens = max(8, next_power_of_2(num_tokens))
    if weight.kind == "head":
        cuts, sizes = _HEAD, [min(tokens, 64)]
    elif is_short:
        cuts, sizes = (_SHORT_FEW, [8]) if tokens == 8 else (_SHORT_MANY, [t for t in (16, 32, 64) if t <= tokens])
    else:
        cuts, sizes = (_LONG_FEW, [tokens]) if tokens <= 16 else (_LONG_MANY, [min(tokens, 64)])
    for size in sizes:
        yield from (Tile(size, *cut, late=late) for cut in cuts)


class Bench:
    """Several copies of one weight on the GPU, with inputs."""

    def __init__(self, weight: Weight, num_tokens: int, dtype: torch.dtype, max_copies: int = _MAX_LAUNCHES) -> None:
        self._weight = weight
        self._plain: float | None = None
        _, out_size, in_size, _ = weight
        count = max(1, min(max_copies, _ROTATED_BYTES // weight.num_bytes))
        rows = 2 * out_size if weight.kind == "gated" else out_size

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=dtype, device="cuda")

        self.matrices = [random(rows, in_size) / in_size**0.5 for _ in range(count)]
        self._x, self._residual = random(num_tokens, in_size), random(num_tokens, out_size)
        self._gain, self._own_gain = random(out_size), random(in_size)
        self._squares = torch.rand(num_tokens, max(1, in_size // 16), device="cuda")

    def fused(self, tile: Tile, matrix: Tensor) -> Tensor:
        scaled, kind = Scaled(self._x, self._squares, 1e-5), self._weight.kind
        if kind == "norm":
            return small_linear(scaled, matrix, Epilogue(), tile).out
        if kind == "gated":
            return small_linear(scaled, matrix, Epilogue(activation="silu"), tile).out
        if kind == "add":
            return small_linear(self._x, matrix, Epilogue(residual=self._residual, gain=self._gain), tile).out
        if kind == "plain":
            return small_linear(self._x, matrix, Epilogue(), tile).out
        return small_linear(self._x, matrix, Epilogue(), tile, torch.float32).out

    def plain(self, matrix: Tensor) -> Tensor:
        kind, x = self._weight.kind, self._x
        if kind == "head":
            logits: Tensor = torch.mm(x, matrix.t(), out_dtype=torch.float32)
            return logits
        if kind in ("add", "plain"):
            return F.linear(x, matrix)  # the residual is added by the next norm
        normed = add_rms_norm.body(x, x, self._own_gain, 1e-5)[0]
        return swiglu.body(F.linear(normed, matrix)) if kind == "gated" else F.linear(normed, matrix)

    def expected(self) -> Tensor:
        kind = self._weight.kind
        out: Tensor = self._x.float() @ self.matrices[0].float().t()
        if kind in ("norm", "gated"):
            out *= torch.rsqrt(self._squares.sum(1, keepdim=True) / self._weight.in_size + 1e-5)
        if kind == "gated":
            gate, up = torch.chunk(out, 2, dim=1)
            out = F.silu(gate) * up
        return out + self._residual.float() if kind == "add" else out

    def is_right(self, tile: Tile) -> bool:
        expected = self.expected()
        error = (self.fused(tile, self.matrices[0]).float() - expected).norm() / expected.norm()
        return bool(error < _MAX_ERROR)

    def microseconds(self, product: Callable[[Tensor], Tensor]) -> float:
        """Of one launch among others of its kind."""
        count = max(8, len(self.matrices))

        def launch() -> list[Tensor]:
            return [product(self.matrices[i % len(self.matrices)]) for i in range(count)]

        return replay_microseconds(launch) / count

    def measured(self, tile: Tile) -> Measured:
        us = self.microseconds(functools.partial(self.fused, tile))
        return Measured(tile, round(us, 2), round(self._plain_us(), 2))

    def _plain_us(self) -> float:
        if self._plain is None:
            self._plain = self.microseconds(self.plain)
        return self._plain


class Heads(NamedTuple):
    """The shape of the attention between the products."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class LayerBench:
    """Whole layers in sequence: a kernel's tail overlaps its neighbour's start, so tiles are chosen in context."""

    def __init__(self, weights: Sequence[Weight], heads: Heads, num_tokens: int, dtype: torch.dtype) -> None:
        self._benches = [Bench(weight, num_tokens, dtype) for weight in weights]
        self._num_layers = max(2, min(32, *(len(bench.matrices) for bench in self._benches)))
        count, kv_heads, head_dim = heads
        pages = _CONTEXT // _PAGE_SIZE + 1
        shape = (num_tokens * pages + 2, 2, kv_heads, _PAGE_SIZE, head_dim)
        self._caches = [torch.randn(shape, dtype=dtype, device="cuda") for _ in range(self._num_layers)]
        table = torch.arange(1, num_tokens * pages + 1, dtype=torch.int32, device="cuda").view(num_tokens, pages)
        joint = torch.randn(num_tokens, count + 2 * kv_heads, head_dim, dtype=dtype, device="cuda")
        q, k, v = torch.split(joint, [count, kv_heads, kv_heads], dim=1)
        cos, sin = torch.rand(2, num_tokens, 1, head_dim, device="cuda")
        offsets = torch.zeros(num_tokens, dtype=torch.int64, device="cuda")
        self._new = NewTokens(q, k, v, cos, sin, table[:, -1].long(), offsets)
        ones = torch.ones(num_tokens, dtype=torch.int32, device="cuda")
        starts = torch.arange(num_tokens + 1, dtype=torch.int32, device="cuda")
        self._requests = PagedRequests(starts, ones, ones * (_CONTEXT + 1), table)
        self._scale = head_dim**-0.5

    def microseconds(self, tiles: Sequence[Tile]) -> float:
        """Time of one layer."""

        def launch() -> list[Tensor]:
            kept = []
            for i in range(self._num_layers):
                for j, (bench, tile) in enumerate(zip(self._benches, tiles, strict=True)):
                    kept.append(bench.fused(tile, bench.matrices[i % len(bench.matrices)]))
                    if j == 0:
                        attend, requests = decode_attention.body, self._requests
                        kept.append(attend(self._new, self._caches[i], requests, 1, self._scale, 0))
            return kept

        return replay_microseconds(launch) / self._num_layers

    def best(self, weights: Sequence[Weight], num_tokens: int, known: Mapping[str, Tile]) -> list[Tile]:
        """One product after another, the rest unchanged."""
        tiles = [known.get(weight.name) or default_tile(weight, num_tokens) for weight in weights]
        for j, weight in enumerate(weights):
            if weight.name in known:
                continue
            times = []
            for tile in candidates(weight, num_tokens):
                with suppress(Exception):  # too much shared memory for this GPU: not a candidate here
                    if self._benches[j].is_right(tile):
                        times.append((self.microseconds([*tiles[:j], tile, *tiles[j + 1 :]]), tile))
            if times:
                tiles[j] = min(times)[1]
        return tiles

    def measured(self, tiles: Sequence[Tile]) -> list[Measured]:
        return [bench.measured(tile) for bench, tile in zip(self._benches, tiles, strict=True)]


def measure_layer(
    weights: Sequence[Weight],
    heads: Heads,
    num_tokens: int,
    dtype: torch.dtype,
    known: Mapping[str, Tile],  # weights with fixed tiles, which are not measured
) -> dict[str, Measured]:
    """The fastest tiles of a layer's products, by the weights' names."""
    bench = LayerBench(weights, heads, num_tokens, dtype)
    found = bench.measured(bench.best(weights, num_tokens, known))
    return {weight.name: one for weight, one in zip(weights, found, strict=True) if weight.name not in known}


def measure(weight: Weight, num_tokens: int, dtype: torch.dtype) -> Measured:
    """The fastest tile of a product outside of layers."""
    bench = Bench(weight, num_tokens, dtype)
    tiles = [tile for tile in candidates(weight, num_tokens) if bench.is_right(tile)]
    return min((bench.measured(tile) for tile in tiles), key=lambda one: one.us)


def replay_microseconds(launch: Callable[[], list[Tensor]]) -> float:
    """Captures the launches: the median of a few replays."""
    cuda: Any = torch.cuda  # which has no types
    launch()
    graph = cuda.CUDAGraph()
    cuda.synchronize()
    with cuda.graph(graph):
        kept = launch()
    times: list[float] = []
    for _ in range(_REPEATS):
        begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    del kept
    return 1e3 * sorted(times)[_REPEATS // 2]


def compile_all(weight: Weight, num_tokens: int, dtype: torch.dtype) -> None:
    """Launch every candidate once, so that Triton's cache on disk has it; for several processes at the same time."""
    bench = Bench(weight, num_tokens, dtype, max_copies=1)
    for tile in candidates(weight, num_tokens):
        with suppress(Exception):  # reported when it is measured
            bench.is_right(tile)
