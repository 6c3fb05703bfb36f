"""Paged attention whose result for a token depends on its own query and keys alone, to the bit.

The keys of a request are cut into parts at fixed positions (``LADDER``). A part is a running softmax over its chunks,
from nothing; the parts of a row are joined one after the other. A token that decodes, one of several that are verified,
and one in the middle of a prompt go over the same chunks with the same instructions: a chunk or a part that a row does
not see leaves it as it is, to the bit. So it does not matter which rows share a tile, or which program has which parts.

Weights are added up by the tensor core, along the keys, like the values they weigh: a reduction of a tile's row would
add in an order that depends on the tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.device.operation import operation
from slipstream.kernels.attention.latent_parts import LADDER, count_parts, first_key_of, parts_of
from slipstream.kernels.attention.paged_attention import PagedRequests, paged_attention
from slipstream.kernels.attention.split_keys import merged
from slipstream.kernels.attention.triton_attention import LOG2_E, can_split
from slipstream.kernels.request_rows import find_request
from slipstream.kernels.triton_jit import arrival_counts, jit, next_power_of_2, runs_triton, tl

_WANTED_PROGRAMS = 512  # enough to keep the memory of a large GPU busy
_MOST_PROGRAMS = 64  # of one tile
_PARTIAL_BYTES = 96 << 20  # of partial results; where more would be needed, a program has all parts of its tile


class Shares(NamedTuple):
    """How the parts of a tile are dealt to programs. No result depends on it."""

    programs: int
    max_parts: int  # of the longest request that the page table has room for


def share_parts(num_tiles: int, rows: int, head_dim: int, max_len: int) -> Shares:
    max_parts = count_parts(max_len)
    wanted = next_power_of_2(-(-_WANTED_PROGRAMS // num_tiles))
    needed = num_tiles * max_parts * rows * (head_dim + 2) * 4
    if wanted == 1 or needed > _PARTIAL_BYTES:
        return Shares(1, max_parts)
    return Shares(min(wanted, max_parts, _MOST_PROGRAMS), max_parts)


@operation(like="q")
def exact_attention(
    q: Tensor,  # [num_tokens, num_heads, head_dim], tokens padded
    kv_cache: Tensor,  # [num_pages, 2, num_kv_heads, page_size, head_dim]
    requests: PagedRequests,  # padded; without first slots
    scale: float,
    window: int,
    query_len: int,  # of every request and of the padding, or 0 for a mixed batch
) -> Tensor:  # as paged_attention; padding tokens are zero
    assert requests.seq_starts is None, "keys that begin anywhere belong to drafters, whose results need not be exact"
    if not runs_triton(q):
        return paged_attention.body(q, kv_cache, requests, scale, window)
    num_tokens, num_heads, head_dim = q.shape
    num_reqs, num_kv_heads, page_size = requests.seq_lens.shape[0], kv_cache.shape[2], kv_cache.shape[3]
    group = num_heads // num_kv_heads
    q = q.contiguous()
    # The size of chunks depends on the model's heads alone, for it says in which order scores are added up.
    row_bytes = next_power_of_2(head_dim) * q.element_size()
    is_wide, shares = row_bytes >= 512, Shares(1, 1)
    if is_uniform := can_split(query_len, group):
        assert num_reqs * query_len == num_tokens, "a batch of equal queries pads requests and tokens together"
        block_m, num_tiles, rows = max(16, next_power_of_2(query_len * group)), num_reqs, query_len * group
        max_len = requests.block_table.shape[1] * page_size
        shares = share_parts(num_tiles * num_kv_heads, rows, head_dim, max_len)
    else:
        block_m, rows = max(32 if is_wide else 64, next_power_of_2(group)), 1
        num_tiles = num_tokens // (block_m // group) + num_reqs
    shape = (num_tiles, num_kv_heads, shares.max_parts, rows) if shares.programs > 1 else (1, 1, 1, 1)
    partial = torch.empty(*shape, head_dim, dtype=torch.float32, device=q.device)
    weight = torch.empty(*shape, 2, dtype=torch.float32, device=q.device)  # largest score, sum of weights
    out = torch.empty_like(q) if is_uniform else torch.zeros_like(q)
    _exact_kernel[(num_tiles, num_kv_heads, shares.programs)](
        q,
        (kv_cache, kv_cache.stride(0)),
        (*requests[:4], requests.block_table.stride(0)),
        (out, partial, weight, arrival_counts(q.device, num_tiles * num_kv_heads)),
        scale * LOG2_E,
        window,
        num_reqs,
        shares.max_parts,
        QUERY_LEN=query_len if is_uniform else 0,
        GROUP=group,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=max(16, next_power_of_2(head_dim)),
        PAGE_SIZE=page_size,
        BLOCK_M=block_m,
        BLOCK_N=64 if row_bytes < 1024 else 32,
        SHARED=shares.programs > 1,
        WINDOW=window > 0,
        LADDER=LADDER,
        num_warps=8 if block_m > (32 if is_wide else 64) else 4,
        num_stages=1 if is_wide or block_m > 64 else 2,
        enable_fp_fusion=False,  # every rounding is written down, so two variants cannot differ in one
    )
    return out


@jit
def _part(
    queries,
    position,  # of each row; before every key for rows without a token
    cached,  # keys and values of the head, the request's pages, how far pages lie apart
    first,
    end,
    scale,
    window,
    VALUES: tl.constexpr,  # how far a value lies after its key
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """A tile over one part: largest score, sum of weights and weighted values of each row."""
    keys_of_head, table, page_stride = cached
    d = tl.arange(0, BLOCK_D)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M, 16], tl.float32)  # the same number in each column
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    ones = tl.full([BLOCK_N, 16], 1.0, queries.dtype)
    for start in range(first, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        is_key = n < end
        page = tl.load(table + n // PAGE_SIZE, mask=is_key, other=0).to(tl.int64)
        from_keys = (keys_of_head + page * page_stride + (n % PAGE_SIZE) * HEAD_DIM)[:, None] + d[None, :]
        kept = is_key[:, None] & (d < HEAD_DIM)[None, :]
        keys = tl.load(from_keys, mask=kept, other=0.0)
        values = tl.load(from_keys + VALUES, mask=kept, other=0.0)
        scores = tl.dot(queries, tl.trans(keys).to(queries.dtype), input_precision="ieee") * scale
        visible = (n[None, :] <= position[:, None]) & is_key[None, :]
        if WINDOW:
            visible = visible & (n[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, 1))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)  # a row without keys so far
        weights = tl.exp2(scores - anchor[:, None]).to(queries.dtype)
        # 1 where the row sees nothing of the chunk: what it has stays as it is.
        shrink = tl.where(largest == higher, 1.0, tl.exp2(largest - anchor))[:, None]
        mass = tl.dot(weights, ones, mass * shrink, input_precision="ieee")
        acc = tl.dot(weights, values.to(queries.dtype), acc * shrink, input_precision="ieee")
        largest = higher
    return largest, tl.max(mass, 1), acc


@jit
def _left(weight, partial, row, there, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """The partial results of one part, as a program has left them."""
    d = tl.arange(0, BLOCK_D)
    peak = tl.load(weight + row * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
    mass = tl.load(weight + row * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
    kept = there[:, None] & (d < HEAD_DIM)[None, :]
    values = tl.load(partial + row[:, None] * HEAD_DIM + d[None, :], mask=kept, other=0.0, cache_modifier=".cg")
    return peak, mass, values


@jit
def _exact_kernel(
    q,
    cache,  # keys and values, and the stride of pages
    tables,  # query_start_loc, query_lens, seq_lens, block_table, the stride of requests
    results,  # out, partial, weight, arrivals
    scale,  # times log2(e): weights are powers of two
    window,
    num_reqs,
    max_parts,
    QUERY_LEN: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHARED: tl.constexpr,
    WINDOW: tl.constexpr,
    LADDER: tl.constexpr,
):
    tile, kv_head, program = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    TILE_QUERIES: tl.constexpr = BLOCK_M // GROUP
    query_start_loc, query_lens, seq_lens, block_table, table_stride = tables
    out, partial, weight, arrivals = results
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
    position = tl.where(sees, seq_len - query_len + query, -1)
    # The keys of the tile: from the first that its first query sees to the last that its last one sees.
    end = tl.minimum(seq_len, seq_len - query_len + first_query + TILE_QUERIES)
    end = tl.where((num_rows > 0) & (seq_len > 0), end, 0)
    end_part = parts_of(end, LADDER)
    first_part = end_part * 0
    if WINDOW:
        first_key = tl.maximum(0, seq_len - query_len + first_query - window + 1)
        # The part that holds the first key is the last of those that the keys up to it have.
        first_part = tl.minimum(parts_of(first_key + 1, LADDER) - 1, end_part)
    # One for requests without keys, for rows of zeros.
    programs = tl.maximum(1, tl.minimum(tl.num_programs(2), end_part - first_part)) if SHARED else 1
    if SHARED and program >= programs:
        return
    cached = (
        cache[0] + kv_head.to(tl.int64) * PAGE_SIZE * HEAD_DIM,
        block_table + request.to(tl.int64) * table_stride,
        cache[1],
    )
    VALUES: tl.constexpr = NUM_KV_HEADS * PAGE_SIZE * HEAD_DIM
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    first_row = (tile.to(tl.int64) * NUM_KV_HEADS + kv_head) * max_parts
    ROWS: tl.constexpr = QUERY_LEN * GROUP
    for part in range(first_part + program, end_part, programs):
        first, after = first_key_of(part, LADDER), tl.minimum(first_key_of(part + 1, LADDER), end)
        found = _part(
            queries,
            position,
            cached,
            first,
            after,
            scale,
            window,
            VALUES,
            HEAD_DIM,
            BLOCK_D,
            PAGE_SIZE,
            BLOCK_M,
            BLOCK_N,
            WINDOW,
        )
        if SHARED and programs > 1:
            row = (first_row + part) * ROWS + m
            tl.store(partial + row[:, None] * HEAD_DIM + d[None, :], found[2], mask=is_value)
            tl.store(weight + row * 2, found[0], mask=is_row)
            tl.store(weight + row * 2 + 1, found[1], mask=is_row)
        else:
            largest, total, acc = merged((largest, total, acc), found)
    is_whole = programs == 1
    if SHARED and programs > 1:
        tl.debug_barrier()
        pair = tile * NUM_KV_HEADS + kv_head
        is_whole = tl.atomic_add(arrivals + pair, 1, sem="acq_rel") == programs - 1
        if is_whole:
            # The last program to arrive joins all parts, in their order.
            tl.store(arrivals + pair, 0)
            for part in range(first_part, end_part):
                left = _left(weight, partial, (first_row + part) * ROWS + m, is_row, HEAD_DIM, BLOCK_D)
                largest, total, acc = merged((largest, total, acc), left)
    if is_whole:
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + place[:, None] + d[None, :], result.to(out.dtype.element_ty), mask=is_value)
