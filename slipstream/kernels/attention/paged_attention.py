"""Attention of new tokens over a paged cache, any number of query tokens per request: the definition."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.device.operation import operation


class PagedRequests(NamedTuple):
    """The requests of a pass: where their query tokens lie, and where their keys."""

    query_start_loc: Tensor  # [num_reqs + 1] int32: where each request's tokens begin
    query_lens: Tensor  # [num_reqs] int32: how many of them are not padding, from the first on
    seq_lens: Tensor  # [num_reqs] int32, query tokens included; 0 for a row that does not run
    block_table: Tensor  # [num_reqs, max_pages] int32
    seq_starts: Tensor | None = None  # [num_reqs] int32: the first slot whose keys are there; None: 0 for all


@operation(like="q")
def paged_attention(
    q: Tensor,  # [num_tokens, num_heads, head_dim]
    kv_cache: Tensor,  # [num_pages, 2, num_kv_heads, page_size, head_dim]
    requests: PagedRequests,
    scale: float,
    window: int,  # positions that a token attends to, itself included; 0: all
    causal: bool = True,  # otherwise each token sees all that is there of its request; without a window
) -> Tensor:  # [num_tokens, num_heads, head_dim]; zero for padding and for tokens that see nothing
    assert causal or not window
    out = torch.zeros_like(q)
    tokens, query_lens, seq_lens = (x.tolist() for x in requests[:3])
    first_slots = [0] * len(seq_lens) if requests.seq_starts is None else requests.seq_starts.tolist()
    for i, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        # Tokens before the first slot attend to nothing; for the others it replaces slot 0.
        num_seeing = min(query_len, seq_len - first_slots[i])
        if not causal and num_seeing > 0:
            num_seeing = query_len
        if num_seeing > 0:
            k, v = _gather(kv_cache, requests.block_table[i], first_slots[i], seq_len, q.dtype)
            seeing = slice(tokens[i] + query_len - num_seeing, tokens[i] + query_len)
            out[seeing] = _attend(q[seeing], k, v, scale, window, causal)
    return out


def _gather(kv_cache: Tensor, page_ids: Tensor, first: int, end: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A request's keys and values in slot order: [num_kv_heads, end - first, head_dim] each."""
    _, _, num_kv_heads, page_size, head_dim = kv_cache.shape
    first_page = first // page_size
    pages = kv_cache[page_ids[first_page : -(-end // page_size)]].to(dtype)
    joined = pages.permute(1, 2, 0, 3, 4).reshape(2, num_kv_heads, -1, head_dim)
    keys, values = joined[:, :, first - first_page * page_size : end - first_page * page_size]
    return keys, values


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, causal: bool) -> Tensor:
    num_query, num_heads, head_dim = q.shape
    num_kv_heads, seq_len, _ = k.shape
    # Query heads of a group share one key head: fold them into the query axis.
    grouped = q.view(num_query, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    scores = torch.einsum("hgqd,hkd->hgqk", grouped, k).mul_(scale)
    if causal and (num_query > 1 or 0 < window < seq_len):
        # Query j of n has position seq_len - n + j and sees itself and what is before, as far as the window goes.
        visible = torch.ones(num_query, seq_len, dtype=torch.bool).tril(seq_len - num_query)
        if window:
            visible = visible.triu(seq_len - num_query - window + 1)
        scores.masked_fill_(~visible, float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return torch.einsum("hgqk,hkd->qhgd", weights, v).reshape(num_query, num_heads, head_dim)
