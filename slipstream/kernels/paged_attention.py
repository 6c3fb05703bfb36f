"""Causal attention of new tokens over a paged cache, any number of query tokens a request: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation


def _shape(
    q: Tensor,
    kv_cache: Tensor,
    query_start_loc: Tensor,
    query_lens: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    window: int,
) -> TensorSpec:
    return TensorSpec(tuple(q.shape), q.dtype)


@operation(_shape)
def paged_attention(
    q: Tensor,  # [num_tokens, num_heads, head_dim]
    kv_cache: Tensor,  # [num_pages, 2, num_kv_heads, page_size, head_dim]
    query_start_loc: Tensor,  # [num_reqs + 1] int32: where each request's tokens begin
    query_lens: Tensor,  # [num_reqs] int32: how many of them are alive, from the first on
    seq_lens: Tensor,  # [num_reqs] int32, living query tokens included; 0 for a row that does not run
    block_table: Tensor,  # [num_reqs, max_pages] int32
    scale: float,
    window: int,  # how many positions a token sees, itself included; 0 means all
) -> Tensor:  # [num_tokens, num_heads, head_dim]; zero for tokens that are not alive
    out = torch.zeros_like(q)
    starts = query_start_loc.tolist()
    for i, (query_len, seq_len) in enumerate(zip(query_lens.tolist(), seq_lens.tolist(), strict=True)):
        tokens = slice(starts[i], starts[i] + query_len)
        if seq_len and query_len:
            k, v = _gather(kv_cache, block_table[i], seq_len, q.dtype)
            out[tokens] = _attend(q[tokens], k, v, scale, window)
    return out


def _gather(kv_cache: Tensor, page_ids: Tensor, seq_len: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A request's keys and values in order: [num_kv_heads, seq_len, head_dim] each."""
    _, _, num_kv_heads, page_size, head_dim = kv_cache.shape
    pages = kv_cache[page_ids[: -(-seq_len // page_size)]].to(dtype)
    joined = pages.permute(1, 2, 0, 3, 4).reshape(2, num_kv_heads, -1, head_dim)
    return joined[0, :, :seq_len], joined[1, :, :seq_len]


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
    num_query, num_heads, head_dim = q.shape
    num_kv_heads, seq_len, _ = k.shape
    # Query heads of a group share one key head: fold them into the query axis.
    grouped = q.view(num_query, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    scores = torch.einsum("hgqd,hkd->hgqk", grouped, k).mul_(scale)
    if num_query > 1 or 0 < window < seq_len:
        # Query j of n stands at position seq_len - n + j and sees itself and what is before, as far as the window goes.
        visible = torch.ones(num_query, seq_len, dtype=torch.bool).tril(seq_len - num_query)
        if window:
            visible = visible.triu(seq_len - num_query - window + 1)
        scores.masked_fill_(~visible, float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return torch.einsum("hgqk,hkd->qhgd", weights, v).reshape(num_query, num_heads, head_dim)
