"""Tiles of the products of few tokens: as measured on this kind of GPU, else by a heuristic.

Measurements are shipped for common GPUs and models, or come from ``slipstream tune`` into the user's cache. A file
records the versions of the kernels and of Triton that it was measured with, and is used for those only; so a choice is
the same after every restart.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from slipstream.config import cache_dir
from slipstream.kernels.linear import small_linear
from slipstream.kernels.linear.small_linear import Tile
from slipstream.kernels.triton_jit import next_power_of_2, triton

# The operations around a product: a norm; a norm and a gate; the residual stream; none; none, with float32
# sums.
Kind = Literal["norm", "gated", "add", "plain", "head"]

MEASURED_TOKENS = (1, 2, 4, 6, 8, 16, 32, 64, 128)
_SHIPPED = Path(__file__).parent / "tuned"
_SHORT = 2048  # a row this long is a program's whole work
_MANY_OUTPUTS = 1 << 14
_SUM_US = 2.5  # time of the launch that adds the residual stream to a cuBLAS product
_STREAMED = 8 << 20  # size from which prefetching a weight does not pay


class Weight(NamedTuple):
    """A weight and its role in a layer; ``out_size`` is the size of the result."""

    kind: Kind
    out_size: int
    in_size: int
    width: int  # bytes of a number

    @property
    def name(self) -> str:
        return f"{self.kind} {self.out_size}x{self.in_size} {8 * self.width} bits"

    @property
    def num_bytes(self) -> int:
        return self.out_size * self.in_size * self.width * (2 if self.kind == "gated" else 1)


class Measured(NamedTuple):
    tile: Tile
    us: float
    plain_us: float  # cuBLAS, with separate kernels for the operations around the product


Table = Mapping[str, Mapping[int, Measured]]  # by the weight's name, then by the maximum number of tokens


# --- files ------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """What a measurement depends on besides the GPU."""
    source = Path(small_linear.__file__).read_bytes()
    return {"triton": triton.__version__, "kernels": hashlib.sha256(source).hexdigest()[:16]}


def file_name(gpu: str) -> str:
    return "-".join(gpu.lower().split()) + ".json"


def user_file(gpu: str) -> Path:
    return cache_dir() / "tiles" / file_name(gpu)


def read_table(path: Path, expected: Mapping[str, str]) -> Table:
    """The content of a file for these versions; empty if it is missing or unreadable."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        if content["versions"] != dict(expected):
            return {}
        return {
            name: {int(tokens): Measured(Tile(*tile), us, plain) for tokens, (tile, us, plain) in found.items()}
            for name, found in content["weights"].items()
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def write_table(path: Path, gpu: str, table: Table, expected: Mapping[str, str]) -> None:
    """Written atomically: another process may be reading."""
    weights = {name: {str(tokens): list(one) for tokens, one in found.items()} for name, found in table.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"gpu": gpu, "versions": dict(expected), "weights": weights}, indent=1) + "\n")
    part.replace(path)


@functools.cache
def table_of(gpu: str) -> Table:
    """Shipped measurements, overridden by local ones."""
    expected = versions()
    return {**read_table(_SHIPPED / file_name(gpu), expected), **read_table(user_file(gpu), expected)}


def forget_tables() -> None:
    """Read the files again when they are next needed."""
    table_of.cache_clear()


# --- choices ----------------------------------------------------------------------------------------


def _found(table: Table, weight: Weight, num_tokens: int) -> Measured | None:
    sizes = table.get(weight.name, {})
    fits = [tokens for tokens in sizes if tokens >= num_tokens]
    return sizes[min(fits)] if fits else None


@functools.cache
def _choose(gpu: str, weight: Weight, num_tokens: int) -> Measured | None:
    return _found(table_of(gpu), weight, num_tokens)


@functools.cache
def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


def _gpu(x: Tensor) -> str:
    return _name(x.device) if x.is_cuda else ""


def measured_tile(weight: Weight, x: Tensor) -> Tile | None:
    """For these tokens, if it was measured."""
    measured = _choose(_gpu(x), weight, x.shape[0]) if x.is_cuda else None
    return None if measured is None else measured.tile


def tile_for(kind: Kind, x: Tensor, out_size: int) -> Tile:
    num_tokens, in_size = x.shape
    weight = Weight(kind, out_size, in_size, x.element_size())
    return measured_tile(weight, x) or default_tile(weight, num_tokens)


def prefers_library(x: Tensor, out_size: int) -> bool:
    """Whether a product that is added to the residual stream is faster by cuBLAS, despite one more launch."""
    measured = _choose(_gpu(x), Weight("add", out_size, x.shape[1], x.element_size()), x.shape[0])
    return measured is not None and measured.plain_us + _SUM_US < measured.us


def head_tile(x: Tensor, out_size: int) -> Tile | None:
    """For logits; None if cuBLAS is faster."""
    weight = Weight("head", out_size, x.shape[1], x.element_size())
    measured = _choose(_gpu(x), weight, x.shape[0])
    if measured is not None:
        return measured.tile if measured.us < measured.plain_us else None
    if x.shape[0] > (64 if weight.in_size > _SHORT else 8) or out_size < _MANY_OUTPUTS:
        return None
    return default_tile(weight, x.shape[0])


def max_fused_tokens(like: Tensor, weights: Iterable[Weight]) -> int:
    """Up to how many tokens a layer of these weights is faster with the kernels here; 0 if they cannot run."""
    return max_fused(table_of(_gpu(like)), tuple(weights)) if like.is_cuda else 0


def max_fused(table: Table, weights: tuple[Weight, ...]) -> int:
    most = 0
    for num_tokens in MEASURED_TOKENS:
        found = [_found(table, weight, num_tokens) for weight in weights]
        if None in found:
            # For long rows cuBLAS is faster as soon as tokens fill a tile.
            return 128 if all(weight.in_size <= _SHORT for weight in weights) else 16
        pairs = [(weight, one) for weight, one in zip(weights, found, strict=True) if one]
        own = sum(min(one.us, one.plain_us + _SUM_US) if weight.kind == "add" else one.us for weight, one in pairs)
        if own > sum(one.plain_us for _, one in pairs):
            break
        most = num_tokens
    return most


def default_tile(weight: Weight, num_tokens: int) -> Tile:
    """For shapes without a measurement."""
    kind, out_size, in_size, width = weight
    late = weight.num_bytes > _STREAMED
    if kind == "head":
        tokens = min(64, max(8, next_power_of_2(num_tokens)))
        columns = 64 * 2 // width
        return Tile(8, 64, 2 * columns, 4, 4, late=late) if tokens == 8 else Tile(tokens, 128, columns, 4, 4, late=late)
    if num_tokens == 1 and in_size <= _SHORT and out_size < _MANY_OUTPUTS:
        return Tile(0, 8 if kind == "gated" or in_size > 1024 else 4, 0, 8 if in_size > 1024 else 4, 1)
    if in_size <= _SHORT:
        columns = max(16, min(128, next_power_of_2(in_size)) * 2 // width)
        if num_tokens <= 8:
            is_short = in_size <= 1024
            return Tile(8, 16, columns if is_short else 4 * columns, 1 if is_short else 2, 5 if is_short else 3)
        if num_tokens <= 32:
            return Tile(16, 16 if kind == "norm" else 64, columns, 4, 3, late=late)
        return Tile(32, 32 if kind == "norm" else 64, columns, 4, 3, late=late)
    columns = 256 * 2 // width
    tokens = 8 if num_tokens <= 8 else 16
    if kind == "gated":
        return Tile(tokens, 64, columns, 4, 3, late=late)
    return Tile(tokens, 16, columns, 2, 5 if tokens == 8 else 4, late=late)
