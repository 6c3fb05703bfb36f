"""Cases for the kernel that writes an encoder's output, and for attention over it: many entries, few queries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from slipstream.kernels.attention.encoder_cache import store_encoded
from slipstream.kernels.attention.triton_attention import triton_attention
from tests.kernels.triton_check import Case, Real


def encoded_pages() -> Iterator[Case]:
    for name, (num_entries, heads, head_dim, page_size) in {
        "whole": (32, 3, 16, 16),
        "part": (37, 2, 24, 16),
        "one": (1, 1, 8, 4),
        "small-pages": (9, 6, 64, 1),
    }.items():

        def args(
            num_entries: int = num_entries, heads: int = heads, head_dim: int = head_dim, page_size: int = page_size
        ) -> dict[str, Any]:
            num_pages = -(-num_entries // page_size)
            # A joint projection, as a model has it; the table is longer than the output.
            keys, values = torch.randn(num_entries, 2, heads, head_dim).unbind(1)
            return {
                "keys": Real(keys),
                "values": Real(values),
                "page_ids": (torch.randperm(num_pages + 3) + 1).int(),
                "kv_cache": Real(torch.randn(num_pages + 6, 2, heads, page_size, head_dim)),
            }

        yield Case(f"encoded-{name}", store_encoded, args)


def cross_attention() -> Iterator[Case]:
    """Of requests with other numbers of entries; ``lens`` are their query tokens."""
    for name, lens, query_len in (("decode", [1, 1, 0, 1], 1), ("verify", [4, 2, 4, 0], 4), ("mixed", [1, 70, 5], 0)):

        def args(lens: list[int] = lens, query_len: int = query_len) -> dict[str, Any]:
            entries = torch.tensor([300, 33, 64, 1][: len(lens)], dtype=torch.int32)
            planned = [query_len or count for count in lens]
            starts = torch.tensor([0, *planned]).cumsum(0).int()
            return {
                "q": Real(torch.randn(int(starts[-1]), 4, 16)),
                "kv_cache": Real(torch.randn(60, 2, 4, 16, 16)),
                "query_start_loc": starts,
                "query_lens": torch.tensor(lens, dtype=torch.int32),
                "seq_lens": entries,
                "block_table": (torch.randperm(59)[:57].reshape(3, 19).repeat(2, 1)[: len(lens)] + 1).int(),
                "seq_starts": None,
                "scale": 0.25,
                "window": 0,
                "query_len": query_len,
                "causal": False,
            }

        yield Case(f"cross-{name}", triton_attention, args, scale=4.0)
