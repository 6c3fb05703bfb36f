"""Cases of the kernels that fold a decoder layer's small steps into its large ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from slipstream.kernels.attention.decode_attention import decode_attention
from slipstream.kernels.linear.fused_linear import (
    add_scaled,
    embed_scaled,
    linear_add,
    scale_tokens,
    scaled_gated,
    scaled_linear,
)
from tests.kernels.attention.dense_attention import hide_queries, plant_nan
from tests.kernels.triton_check import Case, Real

# Tokens, outputs, inputs: one of each, none divisible by anything, a model's own, several tiles of tokens.
_PRODUCTS = ((1, 1, 1), (3, 33, 100), (4, 70, 1500), (8, 96, 576), (17, 40, 64), (33, 70, 130), (128, 48, 96))


class _Tokens(NamedTuple):
    """Tokens on their way to a product, their squares in three parts."""

    num_tokens: int
    size: int

    def scaled(self) -> dict[str, Any]:
        x = 2 * torch.randn(self.num_tokens, self.size)
        squares = x.square().sum(1, keepdim=True) * torch.tensor([0.2, 0.5, 0.3])
        return {"scaled": Real(x * torch.randn(self.size)), "squares": squares, "eps": 1e-5}

    def weight(self, out_size: int) -> Real:
        return Real(torch.randn(out_size, self.size) / self.size**0.5)


def products() -> Iterator[Case]:
    for num_tokens, out_size, in_size in _PRODUCTS:
        yield from _products_of(f"{num_tokens}x{out_size}x{in_size}", _Tokens(num_tokens, in_size), out_size)


def _products_of(name: str, tokens: _Tokens, size: int) -> Iterator[Case]:
    def plain(bias: bool) -> dict[str, Any]:
        shift = Real(torch.randn(size)) if bias else None
        return {**tokens.scaled(), "weight": tokens.weight(size), "bias": shift}

    def add(bias: bool) -> dict[str, Any]:
        x, shift = Real(torch.randn(tokens.num_tokens, tokens.size)), Real(torch.randn(size)) if bias else None
        residual = Real(torch.randn(tokens.num_tokens, size))
        return {"x": x, "weight": tokens.weight(size), "bias": shift, "residual": residual}

    for bias in (False, True):
        yield Case(f"scaled_linear-{name}-{bias}", scaled_linear, lambda b=bias: plain(b))
        yield Case(f"linear_add-{name}-{bias}", linear_add, lambda b=bias: add(b))
    for activation in ("silu", "gelu_tanh"):

        def gated(activation: str = activation) -> dict[str, Any]:
            bias = Real(torch.randn(2 * size)) if activation == "silu" else None
            return {**tokens.scaled(), "weight": tokens.weight(2 * size), "bias": bias, "activation": activation}

        yield Case(f"scaled_gated-{name}-{activation}", scaled_gated, gated)
    yield Case(
        f"scale_tokens-{name}", scale_tokens, lambda: {"x": add(False)["x"], "gain": Real(torch.randn(tokens.size))}
    )

    def total() -> dict[str, Any]:
        shape = (tokens.num_tokens, tokens.size)
        parts = {name: Real(torch.randn(shape)) for name in ("x", "residual")}
        return {**parts, "gain": Real(torch.randn(tokens.size))}

    yield Case(f"add_scaled-{name}", add_scaled, total)

    def embedded() -> dict[str, Any]:
        rows, shape = torch.randint(0, 50, (tokens.num_tokens,)), (50, tokens.size)
        return {
            "weight": Real(torch.randn(shape)),
            "token_ids": rows.int(),
            "gain": Real(torch.randn(tokens.size)),
        }

    yield Case(f"embed_scaled-{name}", embed_scaled, embedded)


class _Decode(NamedTuple):
    seq_lens: list[int]  # new tokens included
    query_len: int = 1
    num_unused: list[int] | None = None  # of each request's new tokens
    num_padding: int = 0  # requests without tokens
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 4
    window: int = 0
    norms: bool = False
    seq_starts: tuple[int, ...] = ()  # what lies before is no number, in the cache and among the new tokens
    causal: bool = True


_DECODES = {
    "one": _Decode([1]),
    "first-and-later": _Decode([1, 2, 64, 65, 66, 129, 300], num_padding=2),
    "page-borders": _Decode([4, 5, 8, 9, 64, 128], page_size=8),
    "three-heads-of-nine": _Decode([200, 7], heads=9, kv_heads=3, head_dim=64, page_size=16),
    "norms": _Decode([70, 1, 130], norms=True, num_padding=1),
    "verify": _Decode([4, 5, 64, 66, 131], query_len=4, num_unused=[0, 0, 3, 1, 2], num_padding=1),
    "verify-many": _Decode([90, 17], query_len=17, heads=4, kv_heads=1),
    "verify-unused": _Decode([90, 64], query_len=2, num_unused=[1, 2]),
    "block": _Decode([5, 66, 131, 64], query_len=5, num_unused=[0, 0, 3, 1], num_padding=1, norms=True, causal=False),
    "block-many": _Decode([90, 17], query_len=16, heads=8, kv_heads=2, causal=False),
    "window": _Decode([1, 30, 200, 300], window=70),
    "narrow-window": _Decode([30, 129, 4], window=3, query_len=4),
    "odd-heads": _Decode([100, 3], heads=5, kv_heads=1, head_dim=24),
    "many": _Decode([(37 * i) % 150 + 1 for i in range(20)], heads=4, kv_heads=2),
    # First slots: none, at the border of a page or chunk, amidst one, that of the new token, right and far after it.
    "starts": _Decode([1, 65, 66, 130, 300, 90, 65, 20], num_padding=2, seq_starts=(0, 4, 64, 129, 37, 91, 63, 290)),
    "starts-long": _Decode([1300, 700, 1025, 64], page_size=16, seq_starts=(770, 699, 0, 65), norms=True),
    "starts-verify": _Decode(
        [4, 5, 64, 66, 131, 300, 70],
        query_len=4,
        num_unused=[0, 0, 3, 1, 2, 0, 0],
        num_padding=1,
        seq_starts=(2, 1, 60, 65, 128, 297, 70),
    ),
    "starts-block": _Decode([70, 131, 300], query_len=5, num_unused=[0, 2, 0], seq_starts=(64, 3, 290), causal=False),
    "starts-verify-many": _Decode([90, 17, 200], query_len=17, heads=4, kv_heads=1, seq_starts=(80, 16, 64)),
    "starts-window": _Decode([1, 30, 200, 300, 300], window=70, seq_starts=(0, 29, 140, 231, 20)),
    "starts-narrow-window": _Decode([30, 129, 4], window=3, query_len=4, seq_starts=(28, 126, 4)),
    "starts-three-heads-of-nine": _Decode(
        [200, 7, 150], heads=9, kv_heads=3, head_dim=64, page_size=16, seq_starts=(112, 3, 149)
    ),
    "starts-many": _Decode([150 - i for i in range(20)], heads=4, seq_starts=tuple(11 * i for i in range(20))),
}


def decodes() -> Iterator[Case]:
    for name, shape in _DECODES.items():
        yield Case(f"decode_attention-{name}", decode_attention, lambda s=shape: _decode_args(s))


def _decode_args(s: _Decode) -> dict[str, Any]:
    """A cache that holds what came before the new tokens, and after them values that would outweigh all of it."""
    num_reqs = len(s.seq_lens) + s.num_padding
    unused = torch.tensor([*(s.num_unused or [0] * len(s.seq_lens)), *[s.query_len] * s.num_padding])
    query_lens = s.query_len - unused
    seq_lens = torch.tensor([*s.seq_lens, *[0] * s.num_padding])
    max_pages = -(-max(s.seq_lens) // s.page_size)
    spare = num_reqs * max_pages + 1
    cache = torch.randn(spare + 1, 2, s.kv_heads, s.page_size, s.head_dim)
    cache[0] = 0
    table = 1 + torch.randperm(spare - 1).view(num_reqs, max_pages).int()
    page_ids, offsets = [], []
    for i, (seq_len, query_len) in enumerate(zip(seq_lens.tolist(), query_lens.tolist(), strict=True)):
        for position in range(seq_len - query_len, max_pages * s.page_size):
            cache[table[i, position // s.page_size], :, :, position % s.page_size] = 1e4
        for t in range(s.query_len):
            position = seq_len - query_len + t
            page_ids.append(int(table[i, position // s.page_size]) if t < query_len else spare)
            offsets.append(position % s.page_size if t < query_len else 0)
    num_tokens = num_reqs * s.query_len
    # As the projection leaves them: heads of queries, keys and values side by side.
    joint = torch.randn(num_tokens, s.heads + 2 * s.kv_heads, s.head_dim)
    q, k, v = joint.split([s.heads, s.kv_heads, s.kv_heads], dim=1)
    starts = {}
    if s.seq_starts:
        seq_starts = torch.tensor([*s.seq_starts, *[500] * s.num_padding], dtype=torch.int32)
        plant_nan(cache, table, seq_starts)
        unseen = hide_queries(q, torch.arange(num_reqs) * s.query_len, query_lens, seq_lens, seq_starts)
        k[unseen], v[unseen] = torch.nan, torch.nan
        starts = {"seq_starts": seq_starts}
    angle = torch.rand(num_tokens, 1, s.head_dim // 2) * 6.3
    gains = {"query": Real(torch.randn(s.head_dim)), "key": Real(torch.randn(s.head_dim)), "eps": 1e-6}
    return {
        "q": Real(q),
        "k": Real(k),
        "v": Real(v),
        "cos": torch.cat([angle.cos()] * 2, dim=-1),
        "sin": torch.cat([-angle.sin(), angle.sin()], dim=-1),
        "kv_cache": Real(cache),
        "page_ids": torch.tensor(page_ids),
        "offsets": torch.tensor(offsets),
        "query_start_loc": torch.arange(num_reqs + 1, dtype=torch.int32) * s.query_len,
        "query_lens": query_lens.int(),
        "seq_lens": seq_lens.int(),
        "block_table": table,
        "query_len": s.query_len,
        "scale": s.head_dim**-0.5,
        "window": s.window,
        "causal": s.causal,
        **(gains if s.norms else {}),
        **starts,
    }
