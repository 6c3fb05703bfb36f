"""Batches that begin with common pages: any mix of queries, groups and page borders, rows that do not run, padding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from slipstream.kernels.attention.cascade_attention import cascade_attention
from tests.kernels.triton_check import Case, Real


class Shape(NamedTuple):
    num_common: int  # pages
    query_lens: list[int]
    own_lens: list[int]  # keys after the common pages, queries included; 0 for a row that does not run
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 4
    num_padding: int = 0  # requests; in a uniform batch tokens too
    query_len: int = 0  # of a uniform batch
    spare_tokens: int = 0
    num_unused: tuple[int, ...] = ()  # of each request's query tokens, the last so many are not alive


SHAPES = {
    "decode-one-page": Shape(1, [1, 1], [1, 4], query_len=1),
    "decode-borders": Shape(2, [1] * 5, [1, 4, 5, 64, 130], query_len=1, heads=3, kv_heads=1),
    "decode-many": Shape(3, [1] * 40, [1 + i % 7 for i in range(40)], kv_heads=1, page_size=16),
    "decode-long": Shape(44, [1, 1, 1], [1, 70, 9], query_len=1, heads=8, kv_heads=1, head_dim=32, page_size=16),
    "decode-first-not-running": Shape(5, [1] * 3, [0, 3, 8], query_len=1, num_padding=1, heads=2),
    "verify": Shape(3, [4] * 4, [4, 9, 1, 64], query_len=4, num_unused=(0, 2, 3, 0), num_padding=1, kv_heads=1),
    "verify-too-many-rows": Shape(4, [17, 17], [17, 30], query_len=17, heads=8, kv_heads=1, num_unused=(0, 9)),
    "mixed": Shape(6, [1, 40, 4, 1, 7], [9, 40, 5, 1, 30], heads=6, head_dim=32, num_unused=(0, 0, 2, 0, 0)),
    "mixed-odd-head": Shape(9, [2, 9, 1, 5], [0, 9, 50, 0], 9, 3, 24, num_padding=3, spare_tokens=6),
    "mixed-chunks": Shape(17, [70, 33, 1], [100, 33, 2], heads=3, kv_heads=1, page_size=1),
    "mixed-wide-head": Shape(2, [3, 1], [70, 9], heads=2, kv_heads=1, head_dim=128, page_size=16),
    "decode-widest-head": Shape(3, [1, 1], [3, 40], query_len=1, heads=2, kv_heads=1, head_dim=256, page_size=16),
}


def draw(s: Shape) -> dict[str, Any]:
    num_tokens = sum(s.query_lens) + s.num_padding * s.query_len + s.spare_tokens
    num_reqs, common_len = len(s.query_lens) + s.num_padding, s.num_common * s.page_size
    own_pages = -(-max(s.own_lens) // s.page_size)
    num_pages = s.num_common + num_reqs * own_pages + 1
    cache = torch.randn(num_pages, 2, s.kv_heads, s.page_size, s.head_dim)
    cache[0] = 0
    ids = 1 + torch.randperm(num_pages - 1).int()
    table = ids[s.num_common :].view(num_reqs, own_pages)
    for i, own_len in enumerate([*s.own_lens, *[0] * s.num_padding]):
        # Slots after the last token must not be read, and page 0 may be.
        pages, offset = divmod(own_len, s.page_size)
        if offset:
            cache[table[i, pages], :, :, offset:] = float("nan")
        table[i, pages + bool(offset) :] = 0
    common = ids[: s.num_common].repeat(num_reqs, 1)
    common[len(s.query_lens) :] = 0  # padding has none
    starts = torch.tensor([0, *s.query_lens]).cumsum(0)
    unused = [*(s.num_unused or [0] * len(s.query_lens)), *[0] * s.num_padding]
    planned, own_lens = [*s.query_lens, *[0] * s.num_padding], [*s.own_lens, *[0] * s.num_padding]
    q = torch.randn(num_tokens, s.heads, s.head_dim)
    for i, (begin, own_len) in enumerate(zip(starts.tolist(), s.own_lens, strict=False)):
        q[begin + (planned[i] - unused[i] if own_len else 0) : begin + planned[i]] = float("nan")
    return {
        "q": Real(q),
        "kv_cache": Real(cache),
        "query_start_loc": torch.cat([starts, starts[-1:].repeat(s.num_padding)]).int(),
        "query_lens": torch.tensor(
            [n - d if o else 0 for n, d, o in zip(planned, unused, own_lens, strict=True)]
        ).int(),
        "seq_lens": torch.tensor([common_len + n if n else 0 for n in own_lens]).int(),
        "block_table": torch.cat([common, table], dim=1),
        "scale": s.head_dim**-0.5,
        "query_len": s.query_len,
        "num_common": common_len,
    }


def cascades() -> Iterator[Case]:
    for name, shape in SHAPES.items():
        yield Case(f"cascade-{name}", cascade_attention, lambda s=shape: draw(s))
