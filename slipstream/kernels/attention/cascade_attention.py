"""Attention of requests with a common prefix: its pages are read once per batch, not once per request.

Three launches. The rest of each request, after the common prefix, is computed by ``triton_attention``, which also
returns the weight of every row. The prefix is one sequence that every query row of the batch attends to in full:
programs process tiles of rows, and share its chunks if there are few tiles. Then both parts are merged by weight. A row
without keys of its own is padding: every other token attends at least to itself, after the common prefix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import operation
from slipstream.kernels.attention.paged_attention import PagedRequests, paged_attention
from slipstream.kernels.attention.triton_attention import (
    CHUNK,
    LOG2_E,
    AttentionResult,
    attend_tile,
    can_split,
    launch_attention,
)
from slipstream.kernels.triton_jit import jit_general, next_power_of_2, runs_triton, tl

_WANTED_PROGRAMS = 512  # enough to keep the memory of a large GPU busy
_MAX_SPLITS = 32
_JOINED_ROWS = 8  # rows merged by one program


@operation(like="q")
def cascade_attention(
    q: Tensor,  # [num_tokens, num_heads, head_dim], tokens padded
    kv_cache: Tensor,  # [num_pages, 2, num_kv_heads, page_size, head_dim]
    requests: PagedRequests,  # padded; the first row of the table holds the common pages, even if it does not run
    scale: float,
    query_len: int,  # of every request and of the padding, or 0 for a mixed batch
    num_common: int,  # tokens, whole pages of them, that all requests share; their queries come after these
) -> Tensor:  # as paged_attention; padding tokens are zero
    if not runs_triton(q):
        return paged_attention.body(q, kv_cache, requests, scale, 0)
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, page_size = kv_cache.shape[2], kv_cache.shape[3]
    assert num_common > 0 and num_common % page_size == 0, "whole pages are shared"
    group = num_heads // num_kv_heads
    q = q.contiguous()
    own = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    # Of a mixed batch, padding rows are not written.
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if not can_split(query_len, group):
        lse.fill_(float("-inf"))
    launch_attention(q, kv_cache, requests, scale, 0, query_len, AttentionResult(own, lse, num_common))
    row_bytes, rows = next_power_of_2(head_dim) * q.element_size(), num_tokens * group
    # Keys are read once per tile of rows. Tiles of wide heads are smaller, for the shared memory of small GPUs.
    block_m = 32 if row_bytes >= 512 else 64 if rows <= 64 else 128
    block_n = CHUNK if row_bytes < 1024 else CHUNK // 2
    num_tiles, num_chunks = -(-rows // block_m), -(-num_common // block_n)
    splits = max(1, min(_WANTED_PROGRAMS // (num_tiles * num_kv_heads), num_chunks, _MAX_SPLITS))
    partial = torch.empty(splits, *q.shape, dtype=torch.float32, device=q.device)
    weight = torch.empty(splits, *q.shape[:2], 2, dtype=torch.float32, device=q.device)  # largest score, sum of weights
    heads = {"HEAD_DIM": head_dim, "BLOCK_D": max(16, next_power_of_2(head_dim))}
    _common_kernel[(num_tiles, num_kv_heads, splits)](
        q,
        kv_cache,
        requests.block_table,
        partial,
        weight,
        scale * LOG2_E,
        rows,
        num_common,
        kv_cache.stride(0),
        **heads,
        GROUP=group,
        NUM_KV_HEADS=num_kv_heads,
        PAGE_SIZE=page_size,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=8 if block_m > 64 else 4,
        num_stages=1 if row_bytes >= 512 or block_m > 64 else 2,
    )
    out, num_rows = torch.empty_like(q), num_tokens * num_heads
    _join_kernel[(-(-num_rows // _JOINED_ROWS),)](
        own, lse, partial, weight, out, num_rows, splits, **heads, BLOCK_R=_JOINED_ROWS
    )
    return out


@jit_general("num_rows", "num_common")
def _common_kernel(
    q,
    kv_cache,
    table,
    partial,
    weight,
    scale,  # times log2(e): weights are powers of two
    num_rows,
    num_common,
    page_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A tile of (token, head of the group) rows over every so many of the chunks."""
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, d = tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    is_row = row < num_rows
    head = ((row // GROUP).to(tl.int64) * NUM_KV_HEADS + kv_head) * GROUP + row % GROUP
    is_value = is_row[:, None] & (d < HEAD_DIM)[None, :]
    queries = tl.load(q + head[:, None] * HEAD_DIM + d[None, :], mask=is_value, other=0.0)
    largest, total, acc = attend_tile(
        queries,
        is_row,
        tl.full([BLOCK_M], num_common, tl.int32),  # every row comes after all of these keys
        kv_cache + kv_head.to(tl.int64) * PAGE_SIZE * HEAD_DIM,
        table,
        split,
        (num_common + BLOCK_N - 1) // BLOCK_N,
        0,
        num_common,
        scale,
        0,
        page_stride,
        NUM_KV_HEADS * PAGE_SIZE * HEAD_DIM,
        HEAD_DIM,
        BLOCK_D,
        PAGE_SIZE,
        BLOCK_M,
        BLOCK_N,
        tl.num_programs(2),
        False,
        False,
    )
    num_heads = (num_rows // GROUP).to(tl.int64) * NUM_KV_HEADS * GROUP  # of all tokens
    mine = split * num_heads + head
    tl.store(partial + mine[:, None] * HEAD_DIM + d[None, :], acc, mask=is_value)
    tl.store(weight + mine * 2, largest, mask=is_row)
    tl.store(weight + mine * 2 + 1, total, mask=is_row)


@jit_general("num_rows", "splits")
def _join_kernel(
    own,
    lse,
    partial,
    weight,
    out,
    num_rows,
    splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """A row's own keys, which weigh one at their own scale, then the parts of the common ones in order."""
    row, d = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    is_row = row < num_rows
    is_value = is_row[:, None] & (d < HEAD_DIM)[None, :]
    place = row[:, None] * HEAD_DIM + d[None, :]
    largest = tl.load(lse + row, mask=is_row, other=float("-inf"))
    # NaN is kept, so that it shows in the result.
    lives = largest != float("-inf")
    total = tl.full([BLOCK_R], 1.0, tl.float32)
    acc = tl.load(own + place, mask=is_value, other=0.0)
    mine = row
    for _ in range(splits):
        peak = tl.load(weight + mine * 2, mask=is_row, other=float("-inf"))
        mass = tl.load(weight + mine * 2 + 1, mask=is_row, other=0.0)
        part = tl.load(partial + mine[:, None] * HEAD_DIM + d[None, :], mask=is_value, other=0.0)
        higher = tl.maximum(largest, peak)
        grow, shrink = tl.exp2(peak - higher), tl.exp2(largest - higher)
        total = total * shrink + mass * grow
        acc = acc * shrink[:, None] + part * grow[:, None]
        largest, mine = higher, mine + num_rows
    result = tl.where(lives[:, None], acc / total[:, None], 0.0)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=is_value)
