"""Paged attention of several requests at once in plain torch: gather keys, one batched product for all of them.

The same result as ``paged_attention``, without a loop over requests. Requests are padded to the longest of their slice
with the first slot of the null page, which is always zero: slots after a request's last token or before its first slot
are never read, since weight 0 times a stale NaN would be NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation
from slipstream.kernels import native
from slipstream.kernels.attention.paged_attention import PagedRequests
from slipstream.kernels.native.records import CACHED_KINDS


def _rows_shape(block_table: Tensor, max_keys: int, num_kv_heads: int) -> TensorSpec:
    return TensorSpec((2 * block_table.shape[0] * num_kv_heads * max_keys,), torch.int64)


@operation(_rows_shape)
def key_rows(
    block_table: Tensor,  # [num_reqs, max_pages] int32
    seq_lens: Tensor,  # [num_reqs] int32
    max_keys: int,  # at least the longest request
    num_kv_heads: int,
    page_size: int,
    seq_starts: Tensor | None = None,  # [num_reqs] int32: the first slot whose keys are there; None: 0 for all
) -> Tensor:
    """The row of each key and value in a cache seen as rows of head_dim; ordered (K/V, request, head, position)."""
    position = torch.arange(max_keys)
    page_ids = block_table.long().index_select(1, position // page_size)
    head = torch.arange(num_kv_heads).view(num_kv_heads, 1)
    rows = ((page_ids.unsqueeze(1) * 2 * num_kv_heads) + head) * page_size + position % page_size
    exists = position < seq_lens.unsqueeze(1)
    if seq_starts is not None:
        exists &= position >= seq_starts.unsqueeze(1)
    exists = exists.unsqueeze(1)
    keys = torch.where(exists, rows, 0)
    values = torch.where(exists, rows + num_kv_heads * page_size, 0)
    return torch.stack([keys, values]).flatten()


def _hidden_shape(seq_lens: Tensor, max_query: int, max_keys: int) -> TensorSpec:
    return TensorSpec((seq_lens.shape[0], 1, 1, max_query, max_keys), torch.bool)


@operation(_hidden_shape)
def hidden_keys(
    seq_lens: Tensor,  # [num_reqs] int32
    query_lens: Tensor,  # [num_reqs] int32
    max_query: int,
    max_keys: int,
    window: int,
    seq_starts: Tensor | None = None,  # [num_reqs] int32
    causal: bool = True,  # otherwise every query sees all that is there of its request; without a window
) -> Tensor:
    """Which keys are masked for each query token. Query j of n is at position seq_len - n + j."""
    position = (seq_lens - query_lens).view(-1, 1, 1) + torch.arange(max_query).view(1, -1, 1)
    key = torch.arange(max_keys)
    assert causal or not window
    if not causal:
        position = torch.where(position < seq_lens.view(-1, 1, 1), seq_lens.view(-1, 1, 1) - 1, position)
    hidden = key > position
    if window:
        hidden |= key <= position - window
    # A padding query after the last token sees what the last one sees, so that nothing is divided by zero.
    hidden &= (position < seq_lens.view(-1, 1, 1)) | (key > 0)
    if seq_starts is not None:
        hidden |= key < seq_starts.view(-1, 1, 1)
    return hidden.view(-1, 1, 1, max_query, max_keys)


@operation(like="q")
def batched_attention(
    q: Tensor,  # [num_reqs, max_query, num_heads, head_dim]
    kv_cache: Tensor,  # [num_pages, 2, num_kv_heads, page_size, head_dim]
    rows: Tensor,  # from key_rows
    hidden: Tensor,  # [num_reqs, 1, 1, max_query, max_keys] bool, from hidden_keys
    scale: float,
    some_see_nothing: bool = False,  # all keys may be hidden from a query
) -> Tensor:  # [num_reqs, max_query, num_heads, head_dim]; zero for queries that see nothing
    num_reqs, max_query, num_heads, head_dim = q.shape
    num_kv_heads, max_keys = kv_cache.shape[2], hidden.shape[-1]
    gathered = kv_cache.view(-1, head_dim).index_select(0, rows)
    k, v = gathered.view(2, num_reqs * num_kv_heads, max_keys, head_dim).to(q.dtype)
    # Heads of a group are folded into the query axis: [requests * kv heads, group * query, head_dim].
    folded = q.view(num_reqs, max_query, num_kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(num_reqs * num_kv_heads, -1, head_dim)
    scores = torch.bmm(folded * scale, k.transpose(1, 2))
    scores.view(num_reqs, num_kv_heads, -1, max_query, max_keys).masked_fill_(hidden, float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    if some_see_nothing:
        weights.view(num_reqs, num_kv_heads, -1, max_query, max_keys).masked_fill_(hidden, 0.0)
    out = torch.bmm(weights, v).view(num_reqs, num_kv_heads, -1, max_query, head_dim)
    return out.permute(0, 3, 1, 2, 4).reshape(num_reqs, max_query, num_heads, head_dim)


@operation(like="q")
def in_place_attention(
    q: Tensor,  # [num_tokens, num_heads, head_dim] float32
    kv_cache: Tensor,  # [num_pages, 2, num_kv_heads, page_size, head_dim] float32 or 16 bits
    requests: PagedRequests,
    scale: float,
    window: int,
    causal: bool = True,
    alone: bool = False,  # a token's result is the same, to the bit, however many are computed with it
) -> Tensor:
    """``paged_attention`` by the C kernel, which reads pages in place."""
    assert causal or not window
    lib = native.library()
    assert lib is not None
    q = q.contiguous()
    out = torch.empty_like(q)
    arrays = [None if x is None else x.data_ptr() for x in (q, kv_cache, *requests, out)]
    num_reqs, table_stride = requests.seq_lens.shape[0], requests.block_table.stride(0)
    sizes = (num_reqs, q.shape[1], kv_cache.shape[2], q.shape[2], kv_cache.shape[3], table_stride)
    kind = CACHED_KINDS[kv_cache.dtype]
    if lib.slip_paged_attention(*arrays, *sizes, scale, window, causal, alone, kind, torch.get_num_threads()):
        raise MemoryError("no memory for attention scores")
    return out
