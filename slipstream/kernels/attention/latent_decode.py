"""Attention of few new tokens per request over cached latents, which are keys and values of all heads at once.

The queries have been multiplied with the matrices that make keys from latents, the results are latents still to be
multiplied with those that make values. So a key is loaded once for a tile of (query token, head) rows. A first kernel
computes each part of a request's keys for itself, a second one joins the parts of each row, in their order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.device.operation import operation
from slipstream.kernels.attention import latent_parts
from slipstream.kernels.attention.latent_cache import alike_requests, read_entries
from slipstream.kernels.attention.latent_parts import PartTable, first_key_of, joined_row
from slipstream.kernels.attention.latent_tiles import decode_tile, room_of
from slipstream.kernels.attention.paged_attention import PagedRequests
from slipstream.kernels.triton_jit import jit, jit_general, next_power_of_2, runs_triton, tl

_LOG2_E = 1.4426950408889634
_JOINED_AT_ONCE = 16  # parts of a row


class LatentQueries(NamedTuple):
    """Queries in two parts, like the entries of the cache."""

    latent: Tensor  # [num_tokens, num_heads, latent_dim]
    rope: Tensor  # [num_tokens, num_heads, rope_dim], rotated


@operation(like="q.latent")
def latent_decode(
    q: LatentQueries,
    cache: Tensor,  # [num_pages, page_size, latent_dim + rope_dim]
    requests: PagedRequests,
    table: PartTable,  # from schedule_parts; requests without parts do not take part
    max_query_len: int,  # of the requests that take part
    max_parts: int,  # of all requests together, at most
    scale: float,
) -> Tensor:  # [num_tokens, num_heads, latent_dim]; zero for padding and for tokens that see nothing
    if runs_triton(cache):
        return _launch(q, cache, requests, table, max_query_len, max_parts, scale)
    out = torch.zeros_like(q.latent, memory_format=torch.contiguous_format)
    num_heads, latent_dim = out.shape[1:]
    takes_part = table.part_starts.diff()[: requests.seq_lens.shape[0]] > 0
    queries = torch.cat(q, dim=2)
    for some in alike_requests(requests, takes_part):
        keys = read_entries(cache, some.requests, 0, some.num_keys).to(out.dtype)
        shape = (*some.tokens.shape, num_heads, some.num_keys)
        rows = queries[some.tokens].flatten(1, 2) * scale
        scores = torch.bmm(rows, keys.transpose(1, 2)).view(shape).masked_fill_(some.hidden, float("-inf"))
        weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(out.dtype, torch.float32))
        weights = weights.masked_fill_(some.hidden, 0.0).to(out.dtype).flatten(1, 2)
        values = torch.bmm(weights, keys[..., :latent_dim]).view(*shape[:3], latent_dim)
        out[some.tokens[some.exists]] = values[some.exists]
    return out


def _launch(
    q: LatentQueries,
    cache: Tensor,
    requests: PagedRequests,
    table: PartTable,
    max_query_len: int,
    max_parts: int,
    scale: float,
) -> Tensor:
    num_tokens, num_heads, latent_dim = q.latent.shape
    rope_dim, device, rows = q.rope.shape[2], cache.device, max_query_len * num_heads
    assert q.latent.stride(2) == q.rope.stride(2) == cache.stride(2) == table.begins.stride(1) == 1
    block_l, block_r = (max(16, next_power_of_2(size)) for size in (latent_dim, rope_dim))
    item = q.latent.element_size()
    tile = decode_tile(rows, (block_l + block_r) * item, item, room_of(cache))
    out = torch.empty(q.latent.shape, dtype=q.latent.dtype, device=device)
    partial = torch.empty(max_parts, rows, latent_dim, dtype=torch.float32, device=device)
    weight = torch.empty(max_parts, rows, 2, dtype=torch.float32, device=device)  # largest score, sum of weights
    _part_kernel[(table.begins.shape[0] - 1, -(-rows // tile.rows))](
        q,
        (q.latent.stride(0), q.latent.stride(1), q.rope.stride(0), q.rope.stride(1)),
        (cache, cache.stride(0), cache.stride(1)),
        (*requests, requests.block_table.stride(0)),
        table,
        (partial, weight),
        scale * _LOG2_E,
        rows,
        NUM_HEADS=num_heads,
        LATENT=latent_dim,
        ROPE=rope_dim,
        BLOCK_L=block_l,
        BLOCK_R=block_r,
        PAGE_SIZE=cache.shape[1],
        BLOCK_M=tile.rows,
        BLOCK_K=tile.keys,
        STARTS=requests.seq_starts is not None,
        LADDER=latent_parts.LADDER,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    _join_kernel[(num_tokens, num_heads)](
        (requests.query_start_loc, requests.query_lens),
        table.part_starts,
        partial,
        weight,
        out,
        requests.seq_lens.shape[0],
        rows,
        max_query_len,
        NUM_HEADS=num_heads,
        LATENT=latent_dim,
        BLOCK_L=block_l,
        AT_ONCE=_JOINED_AT_ONCE,
    )
    return out


@jit
def _attend(
    queries,  # latent, rope
    cached,  # entries, strides of pages and slots, table of pages, first slot
    position,
    bounds,  # the part's first key, and its end
    scale,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STARTS: tl.constexpr,
):
    """A tile over a part of the keys: largest score, sum of weights and weighted latents of each row."""
    q_latent, q_rope = queries
    cache, page_stride, slot_stride, pages, first_slot = cached
    begin, end = bounds
    i, r = tl.arange(0, BLOCK_L)[None, :], tl.arange(0, BLOCK_R)[None, :]
    largest, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
    for first in range(begin, end, BLOCK_K):
        n = first + tl.arange(0, BLOCK_K)
        is_key = n < end
        if STARTS:
            is_key = is_key & (n >= first_slot)
        page = tl.load(pages + n // PAGE_SIZE, mask=is_key, other=0).to(tl.int64)
        entry = (cache + page * page_stride + (n % PAGE_SIZE) * slot_stride)[:, None]
        latents = tl.load(entry + i, mask=is_key[:, None] & (i < LATENT), other=0.0).to(q_latent.dtype)
        rope = tl.load(entry + LATENT + r, mask=is_key[:, None] & (r < ROPE), other=0.0).to(q_rope.dtype)
        scores = tl.dot(q_rope, tl.trans(rope), input_precision="ieee")
        scores = tl.dot(q_latent, tl.trans(latents), scores, input_precision="ieee") * scale
        visible = (n[None, :] <= position[:, None]) & is_key[None, :]
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, 1))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)  # a row without keys so far
        weights = tl.exp2(scores - anchor[:, None])
        shrink = tl.exp2(largest - anchor)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(latents.dtype), latents, acc * shrink[:, None], input_precision="ieee")
        largest = higher
    return largest, total, acc


@jit_general("num_rows")
def _part_kernel(
    q,  # latent, rope
    strides,  # of tokens and heads of both
    cache,  # entries, strides of pages and slots
    tables,  # query_start_loc, query_lens, seq_lens, block_table, seq_starts if there are; the stride of requests
    plan,  # part_starts, begins
    results,  # partial, weight
    scale,  # times log2(e): weights are powers of two
    num_rows,  # of a request in the results
    NUM_HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STARTS: tl.constexpr,
    LADDER: tl.constexpr,
):
    """The run of parts of one program, for a tile of each request's rows."""
    query_start_loc, query_lens, seq_lens, block_table, seq_starts, table_stride = tables
    part_starts, begins = plan
    partial, weight = results
    mine = begins + tl.program_id(0) * 2
    request, part = tl.load(mine), tl.load(mine + 1)
    last_request, last_end = tl.load(mine + 2), tl.load(mine + 3)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    query, head = m // NUM_HEADS, (m % NUM_HEADS).to(tl.int64)
    i, r = tl.arange(0, BLOCK_L)[None, :], tl.arange(0, BLOCK_R)[None, :]
    while request <= last_request:
        before = tl.load(part_starts + request)
        end_part = tl.where(request < last_request, tl.load(part_starts + request + 1) - before, last_end)
        query_len = tl.load(query_lens + request)
        if (part < end_part) & (tl.program_id(1) * BLOCK_M < query_len * NUM_HEADS):
            seq_len = tl.load(seq_lens + request)
            first_slot = tl.load(seq_starts + request) if STARTS else 0
            is_row = query < query_len
            token = tl.load(query_start_loc + request).to(tl.int64) + query
            from_latent = (q[0] + token * strides[0] + head * strides[1])[:, None] + i
            from_rope = (q[1] + token * strides[2] + head * strides[3])[:, None] + r
            latent = tl.load(from_latent, mask=is_row[:, None] & (i < LATENT), other=0.0)
            rope = tl.load(from_rope, mask=is_row[:, None] & (r < ROPE), other=0.0)
            pages = block_table + request.to(tl.int64) * table_stride
            for idx in range(part, end_part):
                begin, end = first_key_of(idx, LADDER), tl.minimum(first_key_of(idx + 1, LADDER), seq_len)
                if STARTS:
                    # Whole blocks before the first slot are left out; the others begin where they always do.
                    begin += tl.maximum(first_slot - begin, 0) // BLOCK_K * BLOCK_K
                largest, total, acc = _attend(
                    (latent, rope),
                    (cache[0], cache[1], cache[2], pages, first_slot),
                    seq_len - query_len + query,
                    (begin, end),
                    scale,
                    LATENT,
                    ROPE,
                    BLOCK_L,
                    BLOCK_R,
                    PAGE_SIZE,
                    BLOCK_M,
                    BLOCK_K,
                    STARTS,
                )
                row = (before + idx).to(tl.int64) * num_rows + m
                tl.store(partial + row[:, None] * LATENT + i, acc, mask=is_row[:, None] & (i < LATENT))
                tl.store(weight + row * 2, largest, mask=is_row)
                tl.store(weight + row * 2 + 1, total, mask=is_row)
        request += 1
        part = request * 0


@jit
def _request_of(query_start_loc, token, num_reqs, max_query_len):
    """The request in whose slots a token is: the last one that begins at it or before; -1 or ``num_reqs``: none."""
    # In a batch of equal queries it is known without a search.
    guess = tl.minimum(token // max_query_len, num_reqs - 1)
    after = tl.load(query_start_loc + guess + 1)
    found = (tl.load(query_start_loc + guess) <= token) & (token < after)
    low = tl.where(found, guess + 1, 0)
    high = tl.where(found, guess + 1, num_reqs + 1)
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) <= token:
            low = middle + 1
        else:
            high = middle
    return low - 1


@jit_general("num_reqs", "num_rows", "max_query_len")
def _join_kernel(
    tables,  # query_start_loc, query_lens
    part_starts,
    partial,
    weight,
    out,
    num_reqs,
    num_rows,
    max_query_len,
    NUM_HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_L: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """One row of the result: its parts, in ascending order."""
    token, head = tl.program_id(0), tl.program_id(1)
    query_start_loc, query_lens = tables
    request = _request_of(query_start_loc, token, num_reqs, max_query_len)
    exists = (request >= 0) & (request < num_reqs)
    query = token - tl.load(query_start_loc + request, mask=exists, other=0)
    exists = exists & (query < tl.load(query_lens + request, mask=exists, other=0))
    begin = tl.load(part_starts + request, mask=exists, other=0)
    end = tl.load(part_starts + request + 1, mask=exists, other=0)
    row, i = query * NUM_HEADS + head, tl.arange(0, BLOCK_L)
    result = joined_row(partial, weight, (begin, end), (row, num_rows), LATENT, BLOCK_L, AT_ONCE)
    place = (token.to(tl.int64) * NUM_HEADS + head) * LATENT
    tl.store(out + place + i, result.to(out.dtype.element_ty), mask=i < LATENT)
