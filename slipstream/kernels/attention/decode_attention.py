"""Attention of a batch in which every request has equally few new tokens: rotation, cache write and attention fused.

A program takes the query heads of one key head of one request. The keys are cut into chunks: those in the cache by
position, then the new tokens as one more, whose keys come from the projection itself and are stored on the way. Chunk c
belongs to program c modulo the number of programs; partial results are joined in the programs' order by the last to
arrive. So a step needs no launch between the projection and attention, and no program waits for a key to be stored. How
many of the programs work, a request's length says, on the device: what few have left is joined sooner.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.device.operation import operation
from slipstream.kernels.attention.paged_attention import PagedRequests, paged_attention
from slipstream.kernels.attention.rope_cache import NewTokens, rope_and_cache
from slipstream.kernels.attention.split_keys import first_of, hand_in, store_whole
from slipstream.kernels.elementwise.rms_norm import rms_norm
from slipstream.kernels.triton_jit import (
    arrival_counts,
    early_start,
    jit,
    jit_general,
    let_next_start,
    next_power_of_2,
    runs_triton,
    tl,
    wait_for_last,
)

_MAX_SPLITS = 64
_WANTED_PROGRAMS = 512  # enough to keep the memory of a large GPU busy
_JOINED_A_THREAD = 128  # numbers of partial results processed at once by a thread


class Cut(NamedTuple):
    """How the keys of a request are split among programs."""

    splits: int  # maximum programs per key head
    chunk: int  # keys per chunk
    num_warps: int
    num_stages: int
    hold: bool = False  # prefetch the next chunk into registers: the first one before the previous kernel has ended


def cut_for(num_tiles: int, query_len: int, rows: int, head_bytes: int) -> Cut:
    """Measured on an NVIDIA H200: contexts of 300 to 32,768 tokens, alone and between the products of a layer."""
    splits = 1
    if num_tiles < _WANTED_PROGRAMS * 3 // 4:
        splits = min(_MAX_SPLITS, next_power_of_2(-(-_WANTED_PROGRAMS // num_tiles)))
    if rows > 64 or head_bytes >= 512:
        return Cut(splits, 64 if head_bytes < 1024 else 32, 4 if rows <= 64 else 8, 1)
    if splits == 1:
        return Cut(1, 64, 2 if rows <= 16 else 4, 2)
    if head_bytes <= 128 and query_len == 1 and num_tiles >= 16:
        return Cut(splits, 64, 2, 1, hold=True)
    if head_bytes <= 128:
        fewer = 1 << max(1, (_WANTED_PROGRAMS // 2 // num_tiles).bit_length() - 1)  # since they are large
        return Cut(min(splits, fewer), 128, 4, 1, hold=True)
    if num_tiles < 32:
        return Cut(min(splits, 32), 128, 4, 1)
    return Cut(splits, 64, 2, 2) if query_len == 1 else Cut(splits, 128, 4, 2)


@operation(like="new.q", writes=("kv_cache",))
def decode_attention(
    new: NewTokens,  # [num_reqs * query_len] tokens, as the projection left them; heads are rotated whole
    kv_cache: Tensor,  # [num_pages, 2, num_kv_heads, page_size, head_dim]
    requests: PagedRequests,
    query_len: int,  # of every request and of the padding
    scale: float,
    window: int,
    causal: bool = True,  # otherwise the tokens of a request see each other; without a window
) -> Tensor:  # [num_tokens, num_heads, head_dim]; zero for padding and for tokens before the first slot
    assert causal or not window
    if runs_triton(new.q):
        return _launch(new, kv_cache, requests, query_len, scale, window, causal)
    q, k, v, cos, sin, page_ids, offsets, norms = new
    if norms is not None:
        q, k = rms_norm.body(q, norms.query, norms.eps), rms_norm.body(k, norms.key, norms.eps)
    exists = (torch.arange(query_len, device=q.device) < requests.query_lens.unsqueeze(1)).flatten()
    stored = NewTokens(q[exists], k[exists], v[exists], cos[exists], sin[exists], page_ids[exists], offsets[exists])
    turned = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    turned[exists] = rope_and_cache.body(stored, kv_cache)
    starts = torch.arange(requests.seq_lens.shape[0] + 1, dtype=torch.int32, device=q.device) * query_len
    return paged_attention.body(turned, kv_cache, requests._replace(query_start_loc=starts), scale, window, causal)


def _launch(
    new: NewTokens,
    kv_cache: Tensor,
    requests: PagedRequests,
    query_len: int,
    scale: float,
    window: int,
    causal: bool,
) -> Tensor:
    q, k, v, norms = new.q, new.k, new.v, new.norms
    num_tokens, num_heads, head_dim = q.shape
    num_reqs, num_kv_heads = requests.seq_lens.shape[0], k.shape[1]
    rows = query_len * (num_heads // num_kv_heads)
    assert num_reqs * query_len == num_tokens, "a batch of equal queries pads requests and tokens together"
    assert new.cos.shape[-1] == head_dim, "heads that are rotated in part take the other way"
    assert all(x.stride(2) == 1 for x in (q, k, v))
    head_bytes = next_power_of_2(head_dim) * q.element_size()
    cut = cut_for(num_reqs * num_kv_heads, query_len, rows, head_bytes)
    splits = cut.splits
    shape = (num_reqs, num_kv_heads, splits, rows) if splits > 1 else (1, 1, 1, 1)
    partial = torch.empty(*shape, head_dim, dtype=torch.float32, device=q.device)
    weight = torch.empty(*shape, 2, dtype=torch.float32, device=q.device)  # largest score, sum of weights
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    held = next_power_of_2(rows) * next_power_of_2(head_dim)
    gains = (q, q) if norms is None else (norms.query, norms.key)
    _decode_kernel[(num_reqs, num_kv_heads, splits)](
        (q, k, v, new.cos, new.sin, *gains),
        (q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
        (kv_cache, kv_cache.stride(0), requests.block_table, requests.block_table.stride(0)),
        (requests.query_lens, requests.seq_lens, new.page_ids, new.offsets, requests.seq_starts),
        (out, partial, weight, arrival_counts(q.device, num_reqs * num_kv_heads)),
        (scale * 1.4426950408889634, window, 0.0 if norms is None else norms.eps),
        splits,
        QUERY_LEN=query_len,
        GROUP=num_heads // num_kv_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        BLOCK_H=max(16, next_power_of_2(head_dim // 2)),
        PAGE_SIZE=kv_cache.shape[3],
        BLOCK_M=max(16, next_power_of_2(rows)),
        BLOCK_T=max(16, next_power_of_2(query_len)),
        BLOCK_R=next_power_of_2(rows),
        BLOCK_N=cut.chunk,
        SPLIT=splits > 1,
        AT_ONCE=min(4, max(1, _JOINED_A_THREAD * 32 * cut.num_warps // held)),
        HOLD=cut.hold,
        WINDOW=window > 0,
        STARTS=requests.seq_starts is not None,
        NORMS=norms is not None,
        CAUSAL=causal,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        **early_start(q),
    )
    return out


@jit
def _rotated(base, cos, sin, token, gain, exists, eps, HALF: tl.constexpr, BLOCK_H: tl.constexpr, NORMS: tl.constexpr):
    """Heads at ``base``, [rows, 1], of these tokens: both halves, normed if there are norms, then rotated."""
    h = tl.arange(0, BLOCK_H)[None, :]
    there = exists & (h < HALF)
    low = tl.load(base + h, mask=there, other=0.0).to(tl.float32)
    high = tl.load(base + HALF + h, mask=there, other=0.0).to(tl.float32)
    if NORMS:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF) + eps)[:, None]
        kind = base.dtype.element_ty
        low = low * scale * tl.load(gain + h, mask=h < HALF, other=0.0).to(tl.float32)
        high = high * scale * tl.load(gain + HALF + h, mask=h < HALF, other=0.0).to(tl.float32)
        # Rounded as the norm's own result would be.
        low, high = low.to(kind).to(tl.float32), high.to(kind).to(tl.float32)
    c = tl.load(cos + token * 2 * HALF + h, mask=there, other=0.0).to(tl.float32)
    s = tl.load(sin + token * 2 * HALF + HALF + h, mask=there, other=0.0).to(tl.float32)
    kind = base.dtype.element_ty
    return (low * c - high * s).to(kind), (high * c + low * s).to(kind)


@jit
def _add_chunk(scores, low_values, high_values, largest, total, acc_low, acc_high):
    """Add one chunk to the running softmax; values in halves, as keys are."""
    higher = tl.maximum(largest, tl.max(scores, 1))
    anchor = tl.where(higher == float("-inf"), 0.0, higher)  # a row without keys so far
    weights = tl.exp2(scores - anchor[:, None])
    shrink = tl.exp2(largest - anchor)
    total = total * shrink + tl.sum(weights, 1)
    weights = weights.to(low_values.dtype)
    acc_low = tl.dot(weights, low_values, acc_low * shrink[:, None], input_precision="ieee")
    acc_high = tl.dot(weights, high_values, acc_high * shrink[:, None], input_precision="ieee")
    return higher, total, acc_low, acc_high


@jit
def _chunks(first_slot, num_cached, window, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, STARTS: tl.constexpr):
    """The first chunk with something to see, and that of the new tokens, stored even if no query sees them."""
    first_chunk = tl.maximum(0, num_cached - window + 1) // BLOCK_N if WINDOW else 0
    last_chunk = (num_cached + BLOCK_N - 1) // BLOCK_N
    if STARTS:
        first_chunk = tl.minimum(tl.maximum(first_chunk, first_slot // BLOCK_N), last_chunk)
    return first_chunk, last_chunk


@jit
def _load_chunk(
    chunk,
    cached,  # table of pages, keys, first slot, number of cached keys, how far pages lie apart
    VALUES: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STARTS: tl.constexpr,
):
    """Keys and values of a chunk in halves; zeros where there are none."""
    table, keys, first_slot, num_cached, page_stride = cached
    n, h = chunk * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_H)
    is_key = n < num_cached
    if STARTS:
        is_key = is_key & (n >= first_slot)
    page = tl.load(table + n // PAGE_SIZE, mask=is_key, other=0).to(tl.int64)
    row = (keys + page * page_stride + (n % PAGE_SIZE) * 2 * HALF)[:, None] + h[None, :]
    kept = is_key[:, None] & (h < HALF)[None, :]
    k_low, k_high = tl.load(row, mask=kept, other=0.0), tl.load(row + HALF, mask=kept, other=0.0)
    v_low, v_high = tl.load(row + VALUES, mask=kept, other=0.0), tl.load(row + VALUES + HALF, mask=kept, other=0.0)
    return k_low, k_high, v_low, v_high


@jit
def _scores(q_low, q_high, k_low, k_high, scale):
    scores = tl.dot(q_low, tl.trans(k_low), input_precision="ieee")
    return tl.dot(q_high, tl.trans(k_high), scores, input_precision="ieee") * scale


@jit
def _add_cached(
    queries,
    held,  # the first chunk, where chunks are held
    begin,
    end,
    step,
    cached,  # as for _load_chunk
    query,
    sees,
    scale,
    window,
    VALUES: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HOLD: tl.constexpr,
    WINDOW: tl.constexpr,
    STARTS: tl.constexpr,
):
    """A tile over its chunks of the cache: largest score, sum of weights and weighted values of each row."""
    q_low, q_high = queries
    _, _, first_slot, num_cached, _ = cached
    largest, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    acc_low, acc_high = tl.zeros([BLOCK_M, BLOCK_H], tl.float32), tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
    for chunk in range(begin, end, step):
        if HOLD:
            k_low, k_high, v_low, v_high = held
            held = _load_chunk(chunk + step, cached, VALUES, HALF, BLOCK_H, PAGE_SIZE, BLOCK_N, STARTS)
        else:
            k_low, k_high, v_low, v_high = _load_chunk(chunk, cached, VALUES, HALF, BLOCK_H, PAGE_SIZE, BLOCK_N, STARTS)
        n = chunk * BLOCK_N + tl.arange(0, BLOCK_N)
        visible = sees[:, None] & (n < num_cached)[None, :]
        if WINDOW:
            visible = visible & (n[None, :] > (num_cached + query)[:, None] - window)
        if STARTS:
            visible = visible & (n >= first_slot)[None, :]
        scores = _scores(q_low, q_high, k_low.to(q_low.dtype), k_high.to(q_low.dtype), scale)
        scores = tl.where(visible, scores, float("-inf"))
        v_low, v_high = v_low.to(q_low.dtype), v_high.to(q_low.dtype)
        largest, total, acc_low, acc_high = _add_chunk(scores, v_low, v_high, largest, total, acc_low, acc_high)
    return largest, total, acc_low, acc_high


@jit
def _add_new(
    state,
    queries,
    new,
    strides,
    keys,
    page_stride,
    slots,
    request,
    kv_head,
    first_new,  # of the new tokens, the first that is seen
    query_len,
    query,
    sees,
    scale,
    window,
    eps,
    QUERY_LEN: tl.constexpr,
    VALUES: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WINDOW: tl.constexpr,
    STARTS: tl.constexpr,
    NORMS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """The chunk of the new tokens: rotated here, stored, and added to the running softmax."""
    largest, total, acc_low, acc_high = state
    q_low, q_high = queries
    _, k, v, cos, sin, _, key_gain = new
    _, _, k_token, k_head, v_token, v_head = strides
    page_ids, offsets = slots
    t, h = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_H)
    is_new, token = t < query_len, request * QUERY_LEN + t
    from_k = (k + token * k_token + kv_head * k_head)[:, None]
    k_low, k_high = _rotated(from_k, cos, sin, token[:, None], key_gain, is_new[:, None], eps, HALF, BLOCK_H, NORMS)
    kept = is_new[:, None] & (h < HALF)[None, :]
    from_v = (v + token * v_token + kv_head * v_head)[:, None] + h[None, :]
    v_low, v_high = tl.load(from_v, mask=kept, other=0.0), tl.load(from_v + HALF, mask=kept, other=0.0)
    page, offset = tl.load(page_ids + token, mask=is_new, other=0), tl.load(offsets + token, mask=is_new, other=0)
    slot = (keys + page * page_stride + offset * 2 * HALF)[:, None] + h[None, :]
    tl.store(slot, k_low.to(keys.dtype.element_ty), mask=kept)
    tl.store(slot + HALF, k_high.to(keys.dtype.element_ty), mask=kept)
    tl.store(slot + VALUES, v_low.to(keys.dtype.element_ty), mask=kept)
    tl.store(slot + VALUES + HALF, v_high.to(keys.dtype.element_ty), mask=kept)
    visible = sees[:, None] & is_new[None, :]
    if CAUSAL:
        visible = visible & (t[None, :] <= query[:, None])
    if WINDOW:
        visible = visible & (t[None, :] > query[:, None] - window)
    if STARTS:
        # Weight 0 is not enough: a masked value may be NaN.
        is_seen = t >= first_new
        visible = visible & is_seen[None, :]
        v_low, v_high = tl.where(is_seen[:, None], v_low, 0.0), tl.where(is_seen[:, None], v_high, 0.0)
    scores = tl.where(visible, _scores(q_low, q_high, k_low, k_high, scale), float("-inf"))
    return _add_chunk(scores, v_low, v_high, largest, total, acc_low, acc_high)


@jit_general("splits")
def _decode_kernel(
    new,  # q, k, v, cos, sin, gains of queries and of keys
    strides,  # of tokens and heads of q, k, v
    cache,  # keys and values with the stride of a page, and the table of pages with that of a request
    tables,  # query_lens, seq_lens, page_ids, offsets, and seq_starts if there are
    results,  # out, partial, weight, arrivals
    numbers,  # scale, times log2(e), for weights are powers of two; window; eps
    splits,
    QUERY_LEN: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HOLD: tl.constexpr,
    WINDOW: tl.constexpr,
    STARTS: tl.constexpr,
    NORMS: tl.constexpr,
    CAUSAL: tl.constexpr,
    EARLY: tl.constexpr,
):
    ROWS: tl.constexpr = QUERY_LEN * GROUP
    request, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    scale, window, eps = numbers
    # Lengths, pages and all keys but the new ones were written before the previous kernel, the projection.
    query_len = tl.load(tables[0] + request, cache_modifier=".cg")
    num_cached = tl.load(tables[1] + request, cache_modifier=".cg") - query_len
    first_slot = tl.load(tables[4] + request, cache_modifier=".cg") if STARTS else 0
    first_chunk, last_chunk = _chunks(first_slot, num_cached, window, BLOCK_N, WINDOW, STARTS)
    # There are never more programs than chunks, so every program has a result.
    parts = tl.minimum(splits, last_chunk - first_chunk + 1) if SPLIT else 1
    if SPLIT and split >= parts:
        return
    begin = first_of(split, first_chunk, parts)
    keys, table = cache[0] + kv_head * PAGE_SIZE * 2 * HALF, cache[2] + request * cache[3]
    VALUES: tl.constexpr = NUM_KV_HEADS * PAGE_SIZE * 2 * HALF  # how far a value lies after its key
    cached = (table, keys, first_slot, num_cached, cache[1])
    held = _load_chunk(begin, cached, VALUES, HALF, BLOCK_H, PAGE_SIZE, BLOCK_N, STARTS) if HOLD else begin
    wait_for_last(EARLY)
    let_next_start(EARLY)
    m = tl.arange(0, BLOCK_M)
    query, head = m // GROUP, kv_head * GROUP + m % GROUP
    sees, token = (m < ROWS) & (query < query_len), request * QUERY_LEN + query
    from_q = (new[0] + token * strides[0] + head * strides[1])[:, None]
    queries = _rotated(from_q, new[3], new[4], token[:, None], new[5], sees[:, None], eps, HALF, BLOCK_H, NORMS)
    state = _add_cached(
        queries,
        held,
        begin,
        last_chunk,
        parts,
        cached,
        query,
        sees,
        scale,
        window,
        VALUES,
        HALF,
        BLOCK_H,
        PAGE_SIZE,
        BLOCK_M,
        BLOCK_N,
        HOLD,
        WINDOW,
        STARTS,
    )
    if last_chunk % parts == split:
        state = _add_new(
            state,
            queries,
            new,
            strides,
            keys,
            cache[1],
            (tables[2], tables[3]),
            request,
            kv_head,
            first_slot - num_cached,
            query_len,
            query,
            sees,
            scale,
            window,
            eps,
            QUERY_LEN,
            VALUES,
            HALF,
            BLOCK_H,
            BLOCK_T,
            WINDOW,
            STARTS,
            NORMS,
            CAUSAL,
        )
    if SPLIT and parts > 1:
        r, pair = tl.arange(0, BLOCK_R), request * NUM_KV_HEADS + kv_head
        place = (request * QUERY_LEN + r // GROUP) * NUM_KV_HEADS * GROUP + kv_head * GROUP + r % GROUP
        hand_in(
            state,
            results,
            pair,
            place * 2 * HALF,
            split,
            parts,
            splits,
            ROWS,
            HALF,
            BLOCK_M,
            BLOCK_H,
            BLOCK_R,
            AT_ONCE,
        )
    else:
        store_whole(state, results[0], (token * NUM_KV_HEADS * GROUP + head) * 2 * HALF, m < ROWS, HALF, BLOCK_H)
