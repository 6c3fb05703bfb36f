"""Attention over prompts for Hopper and newer: a page of keys is one transfer of the tensor memory accelerator (TMA).

The same operation as ``triton_attention`` for a batch of prompts. Pages are loaded straight into shared memory, from
which the tensor cores read both operands of keys and values, with no address of a key computed by a thread. A chunk of
keys is one page, so pages of 64 or 128 tokens are what it is made for; smaller ones work and are slow. A tile's chunks
are taken in the order of their positions. Those that all of its queries see need no mask; in the others, values that
no query sees are cleared, since a weight of zero does not remove a NaN. The longest tiles start first.

It is not measured yet, and nothing chooses it by itself (``prompt_kernel``).
"""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.device.operation import operation
from slipstream.kernels.attention.latent_tiles import room_of
from slipstream.kernels.attention.paged_attention import PagedRequests, paged_attention
from slipstream.kernels.request_rows import find_request
from slipstream.kernels.triton_jit import jit, next_power_of_2, runs_triton, tl

_LOG2_E = 1.4426950408889634
_HEAD_DIMS, _LEAST_PAGE, _LARGEST_PAGE = (64, 128, 256), 16, 128
_HOPPER = (9, 0)
_OTHER_BYTES = 2048  # of shared memory: barriers, reductions


class PromptTile(NamedTuple):
    """How a tile of prompt queries is computed."""

    rows: int  # query tokens times heads of a group
    num_warps: int
    num_stages: int
    specializes: bool = False  # warps that load and warps that compute


def prompt_tiles(head_dim: int, page_size: int, shared: int, item_bytes: int = 2) -> list[PromptTile]:
    """What a tuner tries on a GPU with so many bytes of shared memory, the presumed best first.

    None specializes: for Hopper, Triton 3.6 makes the same code with and without, for Blackwell it fails to compile.
    """
    shapes = [(rows, stages) for rows in (128, 64) for stages in (3, 2, 1)]
    # Queries, and the keys and values of a page for each stage.
    fitting = [s for s in shapes if item_bytes * head_dim * (s[0] + 2 * s[1] * page_size) + _OTHER_BYTES <= shared]
    return [PromptTile(rows, rows // 16, stages) for rows, stages in fitting]


def can_use_tma(q: Tensor, kv_cache: Tensor, requests: PagedRequests) -> bool:
    """Whether the kernel serves this batch on this device. Drafters, whose keys begin at any slot, go the other way."""
    page_size, head_dim = kv_cache.shape[3:]
    fits = head_dim in _HEAD_DIMS and _LEAST_PAGE <= page_size <= _LARGEST_PAGE and requests.seq_starts is None
    if not fits or kv_cache.dtype != q.dtype or not kv_cache.is_contiguous():
        return False
    if not q.is_cuda:
        return runs_triton(q)
    if q.element_size() != 2 or not prompt_tiles(head_dim, page_size, room_of(q).shared):
        return False
    return torch.cuda.get_device_capability(q.device) >= _HOPPER


@operation(like="q")
def tma_attention(
    q: Tensor,  # [num_tokens, num_heads, head_dim], tokens padded
    kv_cache: Tensor,  # [num_pages, 2, num_kv_heads, page_size, head_dim]
    requests: PagedRequests,  # padded
    scale: float,
    window: int,
) -> Tensor:  # as paged_attention; padding tokens are zero
    if not runs_triton(q):
        return paged_attention.body(q, kv_cache, requests, scale, window)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    launch_tma(q, kv_cache, requests, scale, window, out)
    return out


def launch_tma(
    q: Tensor,
    kv_cache: Tensor,
    requests: PagedRequests,
    scale: float,
    window: int,
    out: Tensor,  # as q; padding is left as it is
    tile: PromptTile | None = None,
) -> None:
    num_tokens, num_heads, head_dim = q.shape
    _, _, num_kv_heads, page_size, _ = kv_cache.shape
    group, num_reqs = num_heads // num_kv_heads, requests.seq_lens.shape[0]
    if tile is None:
        fitting = prompt_tiles(head_dim, page_size, room_of(q).shared, q.element_size())
        tile = fitting[0] if fitting else PromptTile(64, 4, 1)
    block_m = max(tile.rows, next_power_of_2(group))
    pages = kv_cache.view(-1, head_dim)
    assert pages.shape[0] < 1 << 31, "rows of keys are counted in 32 bits"
    num_tiles = num_tokens // (block_m // group) + num_reqs
    _tma_kernel[(num_tiles, num_kv_heads)](
        q.contiguous(),
        import_module("triton.tools.tensor_descriptor").TensorDescriptor.from_tensor(pages, [page_size, head_dim]),
        (*requests[:4], requests.block_table.stride(0)),
        out,
        scale * _LOG2_E,
        window,
        num_reqs,
        GROUP=group,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        BLOCK_M=block_m,
        WINDOW=window > 0,
        SPECIALIZES=tile.specializes,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@jit
def _add_page(
    state,
    queries,
    pages,
    row,  # of the page's first key of this head
    chunk,
    position,
    end,
    scale,
    window,
    NUM_KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,  # whether some query may not see some key
):
    """Add a page of keys to the running softmax."""
    largest, total, acc = state
    keys = pages.load([row, 0])
    scores = tl.dot(queries, keys.T, input_precision="ieee") * scale
    n = chunk * PAGE_SIZE + tl.arange(0, PAGE_SIZE)
    if MASKED:
        scores = tl.where(n[None, :] <= position[:, None], scores, float("-inf"))
    if WINDOW:
        scores = tl.where(n[None, :] > position[:, None] - window, scores, float("-inf"))
    higher = tl.maximum(largest, tl.max(scores, 1))
    anchor = tl.where(higher == float("-inf"), 0.0, higher) if WINDOW or MASKED else higher
    weights = tl.exp2(scores - anchor[:, None])
    shrink = tl.exp2(largest - anchor)
    values = pages.load([row + NUM_KV_HEADS * PAGE_SIZE, 0])
    if MASKED:
        values = tl.where((n < end)[:, None], values, 0.0)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return higher, total * shrink + tl.sum(weights, 1), acc


@jit
def _tma_kernel(
    q,
    pages,  # descriptor of all keys and values: a row each
    tables,  # query_start_loc, query_lens, seq_lens, block_table, and the stride of its requests
    out,
    scale,  # times log2(e): weights are powers of two
    window,
    num_reqs,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WINDOW: tl.constexpr,
    SPECIALIZES: tl.constexpr,
):
    # Late tiles of a prompt have the most keys.
    tile, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    TILE_QUERIES: tl.constexpr = BLOCK_M // GROUP
    query_start_loc, query_lens, seq_lens, block_table, table_stride = tables
    request = find_request(query_start_loc, num_reqs, tile, TILE_QUERIES)
    start = tl.load(query_start_loc + request)
    query_len, seq_len = tl.load(query_lens + request), tl.load(seq_lens + request)
    first_query = (tile - (start // TILE_QUERIES + request)) * TILE_QUERIES
    if (first_query >= query_len) | (seq_len == 0):
        return
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, HEAD_DIM)
    query = first_query + m // GROUP
    is_row = (query < query_len) & (m < TILE_QUERIES * GROUP)
    place = (((start + query).to(tl.int64) * NUM_KV_HEADS + kv_head) * GROUP + m % GROUP) * HEAD_DIM
    queries = tl.load(q + place[:, None] + d[None, :], mask=is_row[:, None], other=0.0)
    first_position = seq_len - query_len + first_query
    position, end = seq_len - query_len + query, tl.minimum(seq_len, first_position + TILE_QUERIES)
    first_chunk = tl.maximum(0, first_position - window + 1) // PAGE_SIZE if WINDOW else 0
    first_masked = tl.maximum(first_chunk, (first_position + 1) // PAGE_SIZE)
    table = block_table + request.to(tl.int64) * table_stride
    state = (
        tl.full([BLOCK_M], float("-inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.zeros([BLOCK_M, HEAD_DIM], tl.float32),
    )
    for chunk in tl.range(first_chunk, first_masked, warp_specialize=SPECIALIZES):
        row = (tl.load(table + chunk) * 2 * NUM_KV_HEADS + kv_head) * PAGE_SIZE
        state = _add_page(
            state, queries, pages, row, chunk, position, end, scale, window, NUM_KV_HEADS, PAGE_SIZE, WINDOW, False
        )
    for chunk in tl.range(first_masked, (end + PAGE_SIZE - 1) // PAGE_SIZE, num_stages=1):
        row = (tl.load(table + chunk) * 2 * NUM_KV_HEADS + kv_head) * PAGE_SIZE
        state = _add_page(
            state, queries, pages, row, chunk, position, end, scale, window, NUM_KV_HEADS, PAGE_SIZE, WINDOW, True
        )
    _, total, acc = state
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + place[:, None] + d[None, :], result.to(out.dtype.element_ty), mask=is_row[:, None])
