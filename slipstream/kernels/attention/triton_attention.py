"""``paged_attention`` in Triton: pages are read in place, and the heads of a group share the loads.

A program processes a tile of (query token, head of the group) rows. In a batch with equally few query tokens per
request the keys are split among ``_SPLITS`` programs in chunks: chunk c belongs to program c modulo ``_SPLITS``,
whatever the batch, and partial results are merged in the programs' order. So a token's result in such batches is a
function of its own keys. Which program merges, the last to finish, is random; the order of the sum is not. In a mixed
batch one program processes all keys of a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.device.operation import operation
from slipstream.kernels.attention.paged_attention import PagedRequests, paged_attention
from slipstream.kernels.attention.split_keys import first_of
from slipstream.kernels.request_rows import find_request
from slipstream.kernels.triton_jit import arrival_counts, jit, next_power_of_2, runs_triton, tl

_SPLITS = 16
CHUNK = 64
MAX_ROWS = 128  # of a tile: query tokens times heads of a group
LOG2_E = 1.4426950408889634


class AttentionResult(NamedTuple):
    """Where attention goes."""

    out: Tensor  # as q, in any type; where keys are not shared out, rows that see nothing are left as they are
    # [num_tokens, num_heads] float32, written as out: logarithm of the sum of weights, base 2
    lse: Tensor | None = None
    num_common: int = 0  # of a cascade: the first slot of every request


@operation(like="q")
def triton_attention(
    q: Tensor,  # [num_tokens, num_heads, head_dim], tokens padded
    kv_cache: Tensor,  # [num_pages, 2, num_kv_heads, page_size, head_dim]
    requests: PagedRequests,  # padded
    scale: float,
    window: int,
    query_len: int,  # of every request and of the padding, or 0 for a mixed batch
    causal: bool = True,  # otherwise each token sees all that is there of its request; without a window
) -> Tensor:  # as paged_attention; padding tokens are zero
    if not runs_triton(q):
        return paged_attention.body(q, kv_cache, requests, scale, window, causal)
    assert causal or not window
    has_splits = can_split(query_len, q.shape[1] // kv_cache.shape[2])
    out = torch.empty_like(q) if has_splits else torch.zeros_like(q)
    launch_attention(q, kv_cache, requests, scale, window, query_len, AttentionResult(out), causal=causal)
    return out


def can_split(query_len: int, group: int) -> bool:
    """Whether the keys of a request are split among programs. If so, every row of the result is written."""
    return 0 < query_len * group <= MAX_ROWS


def launch_attention(
    q: Tensor,
    kv_cache: Tensor,
    requests: PagedRequests,
    scale: float,
    window: int,
    query_len: int,
    result: AttentionResult,
    causal: bool = True,
) -> None:
    num_tokens, num_heads, head_dim = q.shape
    num_reqs, num_kv_heads = requests.seq_lens.shape[0], kv_cache.shape[2]
    group = num_heads // num_kv_heads
    q = q.contiguous()
    # Tiles of wide heads are smaller, for the shared memory of small GPUs.
    row_bytes = next_power_of_2(head_dim) * q.element_size()
    is_wide = row_bytes >= 512
    splits = _SPLITS if can_split(query_len, group) else 1
    if splits > 1:
        assert num_reqs * query_len == num_tokens, "a batch of equal queries pads requests and tokens together"
        block_m = max(16, next_power_of_2(query_len * group))
        num_tiles = num_reqs
    else:
        block_m = max(32 if is_wide else 64, next_power_of_2(group))
        num_tiles = num_tokens // (block_m // group) + num_reqs
    rows = query_len * group if splits > 1 else 1
    shape = (num_tiles, num_kv_heads, splits, rows) if splits > 1 else (1, 1, 1, 1)
    partial = torch.empty(*shape, head_dim, dtype=torch.float32, device=q.device)
    weight = torch.empty(*shape, 2, dtype=torch.float32, device=q.device)  # largest score, sum of weights
    _attention_kernel[(num_tiles, num_kv_heads, splits)](
        q,
        (kv_cache, kv_cache.stride(0)),
        (*requests, requests.block_table.stride(0)),
        (result.out, partial, weight, arrival_counts(q.device, num_tiles * num_kv_heads), result.lse),
        scale * LOG2_E,
        window,
        result.num_common,
        num_reqs,
        QUERY_LEN=query_len if splits > 1 else 0,
        GROUP=group,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=max(16, next_power_of_2(head_dim)),
        PAGE_SIZE=kv_cache.shape[3],
        BLOCK_M=block_m,
        BLOCK_N=CHUNK if row_bytes < 1024 else CHUNK // 2,
        SPLITS=splits,
        WINDOW=window > 0,
        STARTS=requests.seq_starts is not None,
        REST=result.lse is not None,
        CAUSAL=causal,
        num_warps=8 if block_m > (32 if is_wide else 64) else 4,
        num_stages=1 if is_wide or block_m > 64 else 2,
    )


@jit
def attend_tile(
    queries,
    sees,
    position,
    cache_head,
    table,
    begin,
    end_chunk,
    first_slot,
    end,
    scale,
    window,
    page_stride,
    VALUES: tl.constexpr,  # how far a value lies after its key
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    splits,
    WINDOW: tl.constexpr,
    STARTS: tl.constexpr,
):
    """A tile over its chunks: largest score, sum of weights and weighted values of each row."""
    d = tl.arange(0, BLOCK_D)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for chunk in range(begin, end_chunk, splits):
        n = chunk * BLOCK_N + tl.arange(0, BLOCK_N)
        is_key = n < end
        if STARTS:
            is_key = is_key & (n >= first_slot)
        page = tl.load(table + n // PAGE_SIZE, mask=is_key, other=0).to(tl.int64)
        from_keys = (cache_head + page * page_stride + (n % PAGE_SIZE) * HEAD_DIM)[:, None] + d[None, :]
        kept = is_key[:, None] & (d < HEAD_DIM)[None, :]
        keys = tl.load(from_keys, mask=kept, other=0.0)
        values = tl.load(from_keys + VALUES, mask=kept, other=0.0)
        scores = tl.dot(queries, tl.trans(keys).to(queries.dtype), input_precision="ieee") * scale
        visible = sees[:, None] & (n[None, :] <= position[:, None]) & is_key[None, :]
        if WINDOW:
            visible = visible & (n[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, 1))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)  # a row without keys so far
        weights = tl.exp2(scores - anchor[:, None])
        shrink = tl.exp2(largest - anchor)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(queries.dtype), values.to(queries.dtype), acc, input_precision="ieee")
        largest = higher
    return largest, total, acc


@jit
def _reach(query, query_len, seq_len, end_query, CAUSAL: tl.constexpr):
    """The last visible key of each query of a tile, and the end of the tile's keys: that of its last query."""
    position, end = seq_len - query_len + query, tl.minimum(seq_len, seq_len - query_len + end_query)
    if not CAUSAL:
        position, end = seq_len - 1 + 0 * query, seq_len
    return position, tl.where(seq_len > 0, end, 0)


@jit
def _arrive(weight, largest, total, is_row, arrivals, num_chunks, SPLITS: tl.constexpr):
    """Store the rest of a partial result, and return whether all other programs of the tile have done so."""
    tl.store(weight, largest, mask=is_row)
    tl.store(weight + 1, total, mask=is_row)
    tl.debug_barrier()
    is_last = tl.atomic_add(arrivals, 1, sem="acq_rel") == tl.minimum(SPLITS, num_chunks) - 1
    tl.store(arrivals, 0, mask=is_last)
    return is_last


@jit
def _store(
    out,
    lse,
    place,
    largest,
    total,
    acc,
    is_row,
    is_value,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST: tl.constexpr,
):
    """Weighted values divided by the sum of weights; zero for rows without keys."""
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + place[:, None] + tl.arange(0, BLOCK_D)[None, :], result.to(out.dtype.element_ty), mask=is_value)
    if REST:
        tl.store(lse + place // HEAD_DIM, tl.where(total == 0.0, float("-inf"), largest + tl.log2(total)), mask=is_row)


@jit
def _join(
    left,  # partial results, their weights, which pair of tile and head, first chunk and end
    is_row,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Merge the partial results of a tile in order: largest score, sum of weights and weighted values."""
    partial, weight, pair, first_chunk, end_chunk = left
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for split in range(SPLITS):
        # Programs whose first chunk is after the last one have left nothing.
        there = is_row & (first_of(split, first_chunk, SPLITS) < end_chunk)
        row = (pair * SPLITS + split) * ROWS + m
        peak = tl.load(weight + row * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
        mass = tl.load(weight + row * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
        from_part = partial + row[:, None] * HEAD_DIM + d[None, :]
        part = tl.load(from_part, mask=there[:, None] & (d < HEAD_DIM)[None, :], other=0.0, cache_modifier=".cg")
        higher = tl.maximum(largest, peak)
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        grow, shrink = tl.exp2(peak - anchor), tl.exp2(largest - anchor)
        total = total * shrink + mass * grow
        acc = acc * shrink[:, None] + part * grow[:, None]
        largest = higher
    return largest, total, acc


@jit
def _attention_kernel(
    q,
    cache,  # keys and values, and the stride of pages
    tables,  # query_start_loc, query_lens, seq_lens, block_table, seq_starts if there are; the stride of requests
    results,  # out, partial, weight, arrivals, and lse if requested
    scale,  # times log2(e): weights are powers of two
    window,
    num_common,
    num_reqs,
    QUERY_LEN: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    STARTS: tl.constexpr,
    REST: tl.constexpr,  # of a cascade: all requests begin at num_common, and the weight of each row is stored as well
    CAUSAL: tl.constexpr,
):
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    TILE_QUERIES: tl.constexpr = BLOCK_M // GROUP
    query_start_loc, query_lens, seq_lens, block_table, seq_starts, table_stride = tables
    out, partial, weight, arrivals, lse = results
    request = tile if QUERY_LEN > 0 else find_request(query_start_loc, num_reqs, tile, TILE_QUERIES)
    start = tl.load(query_start_loc + request)
    query_len, seq_len = tl.load(query_lens + request), tl.load(seq_lens + request)
    # Padding requests of a batch of equal queries have no tokens, but rows of zeros.
    first_query = 0 if QUERY_LEN > 0 else (tile - (start // TILE_QUERIES + request)) * TILE_QUERIES
    first_token = tile * QUERY_LEN if QUERY_LEN > 0 else start + first_query
    num_rows = (QUERY_LEN if QUERY_LEN > 0 else tl.minimum(query_len - first_query, TILE_QUERIES)) * GROUP
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    query = first_query + m // GROUP
    is_row = (m < num_rows) & (m < TILE_QUERIES * GROUP)
    sees = is_row & (query < query_len) & (seq_len > 0)
    place = (((first_token + m // GROUP).to(tl.int64) * NUM_KV_HEADS + kv_head) * GROUP + m % GROUP) * HEAD_DIM
    is_value = is_row[:, None] & (d < HEAD_DIM)[None, :]
    queries = tl.load(q + place[:, None] + d[None, :], mask=is_value & sees[:, None], other=0.0)
    position, end = _reach(query, query_len, seq_len, first_query + TILE_QUERIES, CAUSAL)
    first_chunk = tl.maximum(0, seq_len - query_len + first_query - window + 1) // BLOCK_N if WINDOW else 0
    first_slot = num_common if REST else tl.load(seq_starts + request) if STARTS else 0
    first_chunk = tl.maximum(first_chunk, first_slot // BLOCK_N) if STARTS or REST else first_chunk
    end_chunk = tl.where(num_rows > 0, (end + BLOCK_N - 1) // BLOCK_N, 0)
    begin = first_of(split, first_chunk, SPLITS)
    if SPLITS > 1 and (begin >= end_chunk) & (split > 0):
        return
    largest, total, acc = attend_tile(
        queries,
        sees,
        position,
        cache[0] + kv_head.to(tl.int64) * PAGE_SIZE * HEAD_DIM,
        block_table + request.to(tl.int64) * table_stride,
        begin,
        end_chunk,
        first_slot,
        end,
        scale,
        window,
        cache[1],
        NUM_KV_HEADS * PAGE_SIZE * HEAD_DIM,
        HEAD_DIM,
        BLOCK_D,
        PAGE_SIZE,
        BLOCK_M,
        BLOCK_N,
        SPLITS,
        WINDOW,
        STARTS or REST,
    )
    # The only program with keys, or program 0 of a request without any, has the whole result.
    is_all = (end_chunk - first_chunk <= 1) & ((begin < end_chunk) | (end_chunk <= first_chunk))
    if SPLITS > 1 and (begin < end_chunk) & (end_chunk - first_chunk > 1):
        pair, num_chunks = tile.to(tl.int64) * NUM_KV_HEADS + kv_head, end_chunk - first_chunk
        row = (pair * SPLITS + split) * (QUERY_LEN * GROUP) + m
        tl.store(partial + row[:, None] * HEAD_DIM + d[None, :], acc, mask=is_value)
        is_all = _arrive(weight + row * 2, largest, total, is_row, arrivals + pair, num_chunks, SPLITS)
        if is_all:
            rows: tl.constexpr = QUERY_LEN * GROUP
            left = (partial, weight, pair, first_chunk, end_chunk)
            largest, total, acc = _join(left, is_row, rows, HEAD_DIM, BLOCK_D, BLOCK_M, SPLITS)
    if SPLITS == 1 or is_all:
        _store(out, lse, place, largest, total, acc, is_row, is_value, HEAD_DIM, BLOCK_D, REST)
