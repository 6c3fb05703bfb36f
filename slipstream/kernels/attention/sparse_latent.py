"""Attention of each token to cached latents of its own choice, which are keys and values of all heads at once.

As in ``latent_decode``, queries have been multiplied with the matrices that make keys of latents, and results are
latents. Which slots a token sees is in its positions alone. They are cut into parts of a fixed size, so that a token's
result is a sum in the same order in every batch; a second kernel joins the parts of each row, in their order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import operation
from slipstream.kernels.attention.index_topk import ChosenKeys
from slipstream.kernels.attention.latent_decode import LatentQueries
from slipstream.kernels.attention.latent_parts import joined_row
from slipstream.kernels.attention.latent_tiles import decode_tile, room_of
from slipstream.kernels.attention.token_keys import TokenKeys
from slipstream.kernels.triton_jit import jit, next_power_of_2, runs_triton, tl

_LOG2_E = 1.4426950408889634
_JOINED_AT_ONCE = 8  # parts of a row
_MAX_ENTRIES = 1 << 17  # of a definition at once: tokens times positions


@operation(like="q.latent")
def sparse_latent_attention(
    q: LatentQueries,
    cache: Tensor,  # [num_pages, page_size, latent_dim + rope_dim]
    block_table: Tensor,  # [num_reqs, max_pages] int32
    token_keys: TokenKeys,  # of the same tokens; only their requests matter
    chosen: ChosenKeys,  # positions after the counts are not read
    part_size: int,  # positions that one program goes over; all: nothing is to be joined
    scale: float,
) -> Tensor:  # [num_tokens, num_heads, latent_dim]; zero for tokens without a position
    if runs_triton(cache):
        return _launch(q, cache, block_table, token_keys, chosen, part_size, scale)
    out = torch.zeros_like(q.latent, memory_format=torch.contiguous_format)
    page_size, latent_dim = cache.shape[1], out.shape[2]
    attending = chosen.counts.nonzero().squeeze(1)
    # Tokens with few positions come together.
    attending = attending[chosen.counts[attending].argsort(stable=True)]
    at_once = max(1, _MAX_ENTRIES // chosen.positions.shape[1])
    for first in range(0, attending.shape[0], at_once):  # none where no token attends, as in a warm-up over padding
        tokens = attending[first : first + at_once]
        counts = chosen.counts[tokens].unsqueeze(1)
        most = int(counts.max())
        there = torch.arange(most) < counts
        slots = torch.where(there, chosen.positions[tokens, :most].long(), 0)
        pages = block_table[token_keys.requests[tokens]].long().gather(1, slots // page_size)
        rows = torch.where(there, pages * page_size + slots % page_size, 0).flatten()
        entries = cache.flatten(0, 1).index_select(0, rows).view(*slots.shape, -1).to(out.dtype)
        entries.masked_fill_(~there.unsqueeze(2), 0.0)  # weight 0 times NaN is NaN
        queries = torch.cat([q.latent[tokens], q.rope[tokens]], dim=2)
        scores = torch.bmm(queries * scale, entries.transpose(1, 2)).masked_fill_(~there.unsqueeze(1), float("-inf"))
        weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(out.dtype, torch.float32)).to(out.dtype)
        out[tokens] = torch.bmm(weights, entries[..., :latent_dim])
    return out


def _launch(
    q: LatentQueries,
    cache: Tensor,
    block_table: Tensor,
    token_keys: TokenKeys,
    chosen: ChosenKeys,
    part_size: int,
    scale: float,
) -> Tensor:
    num_tokens, num_heads, latent_dim = q.latent.shape
    rope_dim, device, item, k = q.rope.shape[2], cache.device, q.latent.element_size(), chosen.positions.shape[1]
    assert q.latent.stride(2) == q.rope.stride(2) == cache.stride(2) == chosen.positions.stride(1) == 1
    block_l, block_r = (max(16, next_power_of_2(size)) for size in (latent_dim, rope_dim))
    tile = decode_tile(num_heads, (block_l + block_r) * item, item, room_of(cache))
    parts = -(-k // part_size)
    out = torch.empty(q.latent.shape, dtype=q.latent.dtype, device=device)
    partial, weight = out, None
    if parts > 1:
        partial = torch.empty(num_tokens, parts, num_heads, latent_dim, dtype=torch.float32, device=device)
        weight = torch.empty(num_tokens, parts, num_heads, 2, dtype=torch.float32, device=device)
    _part_kernel[(num_tokens, -(-num_heads // tile.rows), parts)](
        q,
        (q.latent.stride(0), q.latent.stride(1), q.rope.stride(0), q.rope.stride(1)),
        (cache, cache.stride(0), cache.stride(1)),
        (token_keys.requests, block_table, block_table.stride(0)),
        (*chosen, chosen.positions.stride(0)),
        (partial, weight),
        scale * _LOG2_E,
        NUM_HEADS=num_heads,
        LATENT=latent_dim,
        ROPE=rope_dim,
        BLOCK_L=block_l,
        BLOCK_R=block_r,
        PAGE_SIZE=cache.shape[1],
        PART=part_size,
        BLOCK_M=tile.rows,
        BLOCK_K=tile.keys,
        JOINS=parts > 1,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if weight is not None:
        _join_kernel[(num_tokens, num_heads)](
            chosen.counts,
            partial,
            weight,
            out,
            NUM_HEADS=num_heads,
            LATENT=latent_dim,
            PARTS=parts,
            PART=part_size,
            BLOCK_L=block_l,
            AT_ONCE=_JOINED_AT_ONCE,
        )
    return out


@jit
def _attend(
    queries,  # latent, rope
    cached,  # entries, strides of pages and slots, table of pages
    positions,  # of the part
    num,  # how many there are
    scale,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of heads over some positions: largest score, sum of weights and weighted latents of each row."""
    q_latent, q_rope = queries
    cache, page_stride, slot_stride, pages = cached
    i, r = tl.arange(0, BLOCK_L)[None, :], tl.arange(0, BLOCK_R)[None, :]
    largest, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
    for first in range(0, num, BLOCK_K):
        n = first + tl.arange(0, BLOCK_K)
        is_key = n < num
        slot = tl.load(positions + n, mask=is_key, other=0)
        page = tl.load(pages + slot // PAGE_SIZE, mask=is_key, other=0).to(tl.int64)
        entry = (cache + page * page_stride + (slot % PAGE_SIZE) * slot_stride)[:, None]
        latents = tl.load(entry + i, mask=is_key[:, None] & (i < LATENT), other=0.0).to(q_latent.dtype)
        rope = tl.load(entry + LATENT + r, mask=is_key[:, None] & (r < ROPE), other=0.0).to(q_rope.dtype)
        scores = tl.dot(q_rope, tl.trans(rope), input_precision="ieee")
        scores = tl.dot(q_latent, tl.trans(latents), scores, input_precision="ieee") * scale
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        # Each block has a key, so the largest score is a number from the first one on.
        higher = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(largest - higher)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(latents.dtype), latents, acc * shrink[:, None], input_precision="ieee")
        largest = higher
    return largest, total, acc


@jit
def _part_kernel(
    q,  # latent, rope
    strides,  # of tokens and heads of both
    cache,  # entries, strides of pages and slots
    tables,  # requests of tokens, tables of pages, the stride of those
    chosen,  # positions, counts, the stride of positions
    results,  # partial and weight, or the result if it is not to be joined
    scale,  # times log2(e): weights are powers of two
    NUM_HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    JOINS: tl.constexpr,
):
    """A part of one token's positions, for a tile of its heads."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    num = tl.minimum(tl.load(chosen[1] + token) - part * PART, PART)
    if JOINS & (num <= 0):
        return
    head = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_head, wide = (head < NUM_HEADS)[:, None], head.to(tl.int64)
    i, r = tl.arange(0, BLOCK_L)[None, :], tl.arange(0, BLOCK_R)[None, :]
    from_latent = (q[0] + token * strides[0] + wide * strides[1])[:, None] + i
    from_rope = (q[1] + token * strides[2] + wide * strides[3])[:, None] + r
    latent = tl.load(from_latent, mask=is_head & (i < LATENT), other=0.0)
    rope = tl.load(from_rope, mask=is_head & (r < ROPE), other=0.0)
    pages = tables[1] + tl.load(tables[0] + token).to(tl.int64) * tables[2]
    largest, total, acc = _attend(
        (latent, rope),
        (cache[0], cache[1], cache[2], pages),
        chosen[0] + token * chosen[2] + part * PART,
        num,
        scale,
        LATENT,
        ROPE,
        BLOCK_L,
        BLOCK_R,
        PAGE_SIZE,
        BLOCK_M,
        BLOCK_K,
    )
    row = (token * tl.num_programs(2) + part) * NUM_HEADS + head
    to = results[0] + row[:, None] * LATENT + i
    if JOINS:
        tl.store(results[1] + row * 2, largest, mask=head < NUM_HEADS)
        tl.store(results[1] + row * 2 + 1, total, mask=head < NUM_HEADS)
    else:
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(to, acc.to(results[0].dtype.element_ty), mask=is_head & (i < LATENT))


@jit
def _join_kernel(
    counts,
    partial,
    weight,
    out,
    NUM_HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_L: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """One row of the result: its parts, in ascending order."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    parts = (0, tl.cdiv(tl.load(counts + token), PART))
    row = token * PARTS * NUM_HEADS + head
    result = joined_row(partial, weight, parts, (row, NUM_HEADS), LATENT, BLOCK_L, AT_ONCE)
    i = tl.arange(0, BLOCK_L)
    place = (token * NUM_HEADS + head) * LATENT
    tl.store(out + place + i, result.to(out.dtype.element_ty), mask=i < LATENT)
