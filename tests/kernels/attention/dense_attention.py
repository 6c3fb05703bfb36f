"""What attention must give, in float64 and slot by slot: what a query may not see is not masked, it is never read."""

from __future__ import annotations

import torch
from torch import Tensor


def seen_slots(position: int, start: int, window: int) -> list[int]:
    return [slot for slot in range(position + 1) if slot >= start and (not window or position - slot < window)]


def dense_attention(
    q: Tensor,
    kv_cache: Tensor,
    query_start_loc: Tensor,
    query_lens: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    window: int,
    seq_starts: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    """As ``paged_attention``, whatever the type of its arguments."""
    _, _, num_kv_heads, page_size, head_dim = kv_cache.shape
    first_slots = [0] * len(seq_lens) if seq_starts is None else seq_starts.tolist()
    out = torch.zeros(q.shape, dtype=torch.float64)
    for i, (num_query, seq_len) in enumerate(zip(query_lens.tolist(), seq_lens.tolist(), strict=True)):
        for j in range(num_query if seq_len else 0):
            slots = torch.tensor(
                seen_slots(seq_len - num_query + j if causal else seq_len - 1, first_slots[i], window),
                dtype=torch.int64,
            )
            if len(slots) == 0:
                continue
            pages, offsets = block_table[i, slots // page_size].long(), slots % page_size
            keys, values = kv_cache[pages, :, :, offsets].double().unbind(1)  # [slots, heads, head_dim] each
            token = int(query_start_loc[i]) + j
            query = q[token].double().view(num_kv_heads, -1, head_dim)
            weights = torch.softmax(torch.einsum("hgd,khd->hgk", query, keys) * scale, dim=-1)
            out[token] = torch.einsum("hgk,khd->hgd", weights, values).reshape(-1, head_dim)
    return out


def plant_nan(kv_cache: Tensor, block_table: Tensor, seq_starts: Tensor) -> None:
    """Into every slot before the first of each request."""
    page_size = kv_cache.shape[3]
    for pages, start in zip(block_table, seq_starts.tolist(), strict=True):
        for slot in range(min(start, len(pages) * page_size)):
            if pages[slot // page_size]:
                kv_cache[pages[slot // page_size], :, :, slot % page_size] = torch.nan


def hide_queries(
    q: Tensor, query_start_loc: Tensor, query_lens: Tensor, seq_lens: Tensor, seq_starts: Tensor
) -> Tensor:
    """NaN for every living query before its request's first slot: which tokens those are."""
    hidden = torch.zeros(len(q), dtype=torch.bool)
    for begin, num_query, seq_len, start in zip(
        query_start_loc.tolist(), query_lens.tolist(), seq_lens.tolist(), seq_starts.tolist(), strict=False
    ):
        hidden[begin : begin + max(0, min(num_query, start - (seq_len - num_query)))] = True
    q[hidden] = torch.nan
    return hidden
