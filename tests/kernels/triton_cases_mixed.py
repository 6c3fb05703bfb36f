"""Steps with decodes and prompts for ``mixed_attention``, and prompts for ``tma_attention``, with padding in some."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from slipstream.kernels.attention.mixed_attention import mixed_attention
from slipstream.kernels.attention.paged_attention import PagedRequests
from slipstream.kernels.attention.tma_attention import tma_attention
from tests.kernels.attention.dense_attention import hide_queries, plant_nan
from tests.kernels.triton_check import Case, Real


class Shape(NamedTuple):
    decode_lens: list[int]  # sequence lengths; 0 for a row that does not run
    prompts: list[tuple[int, int]]  # query tokens and sequence length
    query_len: int = 1
    num_unused: tuple[int, ...] = ()  # draft slots of each decode that are not alive
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 4
    window: int = 0
    num_padding: int = 0
    spare_tokens: int = 0
    starts: tuple[int, ...] = ()


SHAPES = {
    "plain": Shape([1, 300, 90], [(40, 100), (7, 7)], heads=6, head_dim=32, page_size=16),
    "drafts": Shape([4, 129, 602], [(33, 33), (5, 80)], query_len=4, num_unused=(3, 0, 2), heads=6),
    "padded": Shape([70, 0], [(9, 40)], num_padding=2, spare_tokens=5),
    "window": Shape([5, 300, 150], [(30, 200), (64, 64)], window=33),
    "wide-head": Shape([70, 3], [(20, 90)], head_dim=128, page_size=16, num_padding=1, spare_tokens=1),
    "starts": Shape([64, 200], [(40, 100), (12, 12)], starts=(60, 37, 77, 3), num_padding=1, spare_tokens=2),
}


def make_args(s: Shape) -> dict[str, Any]:
    decodes, lens = len(s.decode_lens), [*s.decode_lens, *(end for _, end in s.prompts)]
    counts = [*[s.query_len] * decodes, *(count for count, _ in s.prompts)]
    alive = [n - unused for n, unused in zip(counts, (*s.num_unused, *[0] * len(counts)), strict=False)]
    num_reqs, max_pages = len(counts) + s.num_padding, -(-max(lens) // s.page_size)
    cache = torch.randn(num_reqs * max_pages + 1, 2, s.kv_heads, s.page_size, s.head_dim)
    cache[0] = 0
    table = 1 + torch.randperm(num_reqs * max_pages).view(num_reqs, max_pages).int()
    for i, seq_len in enumerate([*lens, *[0] * s.num_padding]):
        pages, offset = divmod(seq_len, s.page_size)
        if offset:
            cache[table[i, pages], :, :, offset:] = float("nan")  # after the last token
        table[i, pages + bool(offset) :] = 0
    starts = torch.tensor([0, *counts, *[0] * s.num_padding]).cumsum(0).int()
    q = torch.randn(int(starts[-1]) + s.spare_tokens, s.heads, s.head_dim)
    query_lens = torch.tensor([*alive, *[0] * s.num_padding], dtype=torch.int32)
    seq_lens = torch.tensor([*lens, *[0] * s.num_padding], dtype=torch.int32)
    seq_starts = None
    if s.starts:
        seq_starts = torch.tensor([*s.starts, *[500] * s.num_padding], dtype=torch.int32)
        plant_nan(cache, table, seq_starts)
        hide_queries(q, starts, query_lens, seq_lens, seq_starts)

    def part(own: slice, own_starts: torch.Tensor) -> PagedRequests:
        own_first = None if seq_starts is None else seq_starts[own]
        return PagedRequests(own_starts, query_lens[own], seq_lens[own], table[own], own_first)

    return {
        "q": Real(q),
        "kv_cache": Real(cache),
        "decodes": part(slice(decodes), starts[: decodes + 1]),
        "prompts": part(slice(decodes, None), starts[decodes:] - starts[decodes]),
        "query_len": s.query_len,
        "scale": s.head_dim**-0.5,
        "window": s.window,
    }


# Without decodes. Heads and pages are those that the kernel serves.
PROMPTS = {
    "chunks": Shape(
        [], [(40, 100), (7, 7), (1, 90)], head_dim=64, page_size=16, heads=6, num_padding=2, spare_tokens=3
    ),
    "stopped": Shape([0], [(150, 150)], head_dim=64, page_size=64, query_len=3),
    "window": Shape([], [(64, 200), (70, 70)], head_dim=64, page_size=32, window=33),
    "wide-head": Shape([], [(20, 290)], head_dim=128, page_size=128, heads=8),
    "widest-head": Shape([], [(9, 70)], head_dim=256, page_size=64, kv_heads=1),
}


def make_prompts(s: Shape) -> dict[str, Any]:
    """All requests in one bundle."""
    args = make_args(s._replace(decode_lens=[], prompts=[*((s.query_len, end) for end in s.decode_lens), *s.prompts]))
    prompts: PagedRequests = args["prompts"]
    named = dict(zip(PagedRequests._fields, prompts, strict=True))
    return {name: args[name] for name in ("q", "kv_cache", "scale", "window")} | named


def cases() -> Iterator[Case]:
    for name, shape in SHAPES.items():
        yield Case(f"mixed-attention-{name}", mixed_attention, partial(make_args, shape))
    for name, shape in PROMPTS.items():
        yield Case(f"tma-attention-{name}", tma_attention, partial(make_prompts, shape))
