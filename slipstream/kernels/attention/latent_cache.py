"""The cache of latent attention: of each token its normed latent and, after it, the rotated part of its key.

Neither has heads: all heads make their keys and values from the same latent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation
from slipstream.kernels.attention.paged_attention import PagedRequests
from slipstream.kernels.attention.rope_cache import rotate
from slipstream.kernels.elementwise.rms_norm import rms_norm
from slipstream.kernels.triton_jit import jit, next_power_of_2, runs_triton, tl

_KEYS_AT_ONCE = 8  # gathered by one program
_MAX_KEYS_TOGETHER = 1 << 17  # of a group of requests in the definitions: requests times the longest
_MAX_WASTE = 2.0  # limit on padded work over real work of such a group


class NewLatents(NamedTuple):
    """A step's tokens in one layer, as the projections leave them."""

    q_rope: Tensor  # [num_tokens, num_heads, rope_dim], not rotated; without heads: to store only
    latents: Tensor  # [num_tokens, latent_dim + rope_dim]: latent before its norm, then rope part before its rotation
    gain: Tensor  # [latent_dim]: the norm's
    eps: float
    cos: Tensor  # [num_tokens, 1, rope_dim], from rotation
    sin: Tensor  # [num_tokens, 1, rope_dim], from rotation
    page_ids: Tensor  # [num_tokens] int64, from rotation_and_slots
    offsets: Tensor  # [num_tokens] int64, from rotation_and_slots
    # Whether pairs that turn together are neighbours, as DeepSeek's weights leave them; rotated they are half a head
    # apart, in queries and keys alike, which changes no product of the two.
    interleaved: bool = False


@operation(like="new.q_rope", writes=("cache",))
def store_latents(
    new: NewLatents,
    cache: Tensor,  # [num_pages, page_size, latent_dim + rope_dim]
) -> Tensor:  # [num_tokens, num_heads, rope_dim], rotated
    if runs_triton(cache):
        return _launch_store(new, cache)
    q, latents, gain, eps, cos, sin, page_ids, offsets, interleaved = new
    latent_dim = gain.shape[0]
    normed = rms_norm.body(latents[:, :latent_dim], gain, eps)
    parts = torch.cat([q, latents[:, None, latent_dim:]], dim=1)
    if interleaved:
        parts = torch.cat([parts[..., 0::2], parts[..., 1::2]], dim=-1)
    turned = rotate(parts.to(cos.dtype), cos, sin).to(q.dtype)
    cache[page_ids, offsets] = torch.cat([normed, turned[:, -1]], dim=1).to(cache.dtype)
    return turned[:, :-1].contiguous()


def _gathered_shape(
    cache: Tensor, requests: PagedRequests, num_keys: int, latent_dim: int
) -> tuple[TensorSpec, TensorSpec]:
    rows = requests.seq_lens.shape[0] * num_keys
    return TensorSpec((rows, latent_dim), cache.dtype), TensorSpec((rows, cache.shape[2] - latent_dim), cache.dtype)


@operation(_gathered_shape)
def gather_latents(
    cache: Tensor,  # [num_pages, page_size, latent_dim + rope_dim]
    requests: PagedRequests,
    first_key: int,
    num_keys: int,  # slots of each request, from first_key on
    latent_dim: int,
) -> tuple[Tensor, Tensor]:  # latents and rope parts, [num_reqs * num_keys, ...]; zeros for slots without a key
    if runs_triton(cache):
        return _launch_gather(cache, requests, first_key, num_keys, latent_dim)
    entries = read_entries(cache, requests, first_key, num_keys).flatten(0, 1)
    return entries[:, :latent_dim].contiguous(), entries[:, latent_dim:].contiguous()


def slots_there(requests: PagedRequests, first_key: int, num_keys: int) -> Tensor:
    """Which of these slots hold a key, [num_reqs, num_keys]: those up to the length, from the first slot on."""
    slot = torch.arange(first_key, first_key + num_keys)
    there = slot < requests.seq_lens.unsqueeze(1)
    return there if requests.seq_starts is None else there & (slot >= requests.seq_starts.unsqueeze(1))


def read_entries(cache: Tensor, requests: PagedRequests, first_key: int, num_keys: int) -> Tensor:
    """Entries of these slots, [num_reqs, num_keys, size]. Zeros where there is no key: weight 0 times NaN is NaN."""
    page_size = cache.shape[1]
    slot, there = torch.arange(first_key, first_key + num_keys), slots_there(requests, first_key, num_keys)
    last_page = requests.block_table.shape[1] - 1
    page_ids = requests.block_table.long().index_select(1, (slot // page_size).clamp(max=last_page))
    rows = torch.where(there, page_ids * page_size + slot % page_size, 0)
    entries = cache.flatten(0, 1).index_select(0, rows.flatten()).view(*rows.shape, -1)
    return entries.masked_fill_(~there.unsqueeze(2), 0.0)


class Alike(NamedTuple):
    """Neighbouring requests of a step, padded to the largest of them, that a definition computes together."""

    ids: Tensor  # [num_reqs] int64
    requests: PagedRequests  # these alone
    tokens: Tensor  # [num_reqs, max_query_len] int64; of padding the last one
    exists: Tensor  # [num_reqs, max_query_len] bool: which are not padding
    hidden: Tensor  # [num_reqs, max_query_len, 1, num_keys] bool: which keys a token does not see
    num_keys: int  # of the longest, from the first key on


def alike_requests(
    requests: PagedRequests, takes_part: Tensor, first_key: int = 0, max_keys: int = 1 << 30
) -> Iterator[Alike]:
    """Requests that take part and have keys from ``first_key`` on; a group ends where padding would waste too much."""
    lens = torch.where(takes_part, (requests.seq_lens - first_key).clamp(0, max_keys), 0).tolist()
    counts = requests.query_lens.tolist()
    members = [i for i, length in enumerate(lens) if length and counts[i]]
    while members:
        num = _count_alike([(counts[i], lens[i]) for i in members])
        group, members = members[:num], members[num:]
        yield _padded(requests, group, max(counts[i] for i in group), first_key, max(lens[i] for i in group))


def _count_alike(sizes: list[tuple[int, int]]) -> int:
    """How many of the first requests fit together; sizes are query tokens and keys."""
    real = widest = longest = 0
    for num, (count, length) in enumerate(sizes):
        widest, longest, real = max(widest, count), max(longest, length), real + count * length
        wasteful = (num + 1) * widest * longest > _MAX_WASTE * real + 4096
        if num and (wasteful or (num + 1) * longest > _MAX_KEYS_TOGETHER):
            return num
    return len(sizes)


def _padded(requests: PagedRequests, group: list[int], max_query_len: int, first_key: int, num_keys: int) -> Alike:
    ids = torch.tensor(group)
    starts, counts, lens, table, first_slots = (None if x is None else x[ids] for x in requests)
    assert starts is not None and counts is not None and lens is not None and table is not None
    query, counts = torch.arange(max_query_len), counts.unsqueeze(1)
    exists = query < counts
    tokens = starts.unsqueeze(1) + torch.minimum(query, counts - 1)
    # A padding query sees nothing.
    position = torch.where(exists, lens.unsqueeze(1) - counts + query, -1).view(*tokens.shape, 1, 1)
    key = torch.arange(first_key, first_key + num_keys)
    hidden = key > position
    if first_slots is not None:
        hidden |= key < first_slots.view(-1, 1, 1, 1)
    own = PagedRequests(starts, counts.squeeze(1), lens, table, first_slots)
    return Alike(ids, own, tokens, exists, hidden, num_keys)


def _launch_store(new: NewLatents, cache: Tensor) -> Tensor:
    q, latents = new.q_rope, new.latents
    num_tokens, num_heads, rope_dim = q.shape
    latent_dim = new.gain.shape[0]
    assert q.stride(2) == 1 and latents.stride(1) == 1 and cache.stride(2) == 1
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _store_kernel[(num_tokens,)](
        (q, latents, new.gain, new.cos, new.sin),
        (q.stride(0), q.stride(1), latents.stride(0), cache.stride(0), cache.stride(1)),
        cache,
        new.page_ids,
        new.offsets,
        out,
        new.eps,
        NUM_HEADS=num_heads,
        LATENT=latent_dim,
        HALF=rope_dim // 2,
        INTERLEAVED=new.interleaved,
        BLOCK_N=next_power_of_2(max(1, num_heads)),
        BLOCK_L=next_power_of_2(latent_dim),
        BLOCK_H=next_power_of_2(rope_dim // 2),
        num_warps=4,
    )
    return out


def _launch_gather(
    cache: Tensor, requests: PagedRequests, first_key: int, num_keys: int, latent_dim: int
) -> tuple[Tensor, Tensor]:
    num_reqs, rope_dim = requests.seq_lens.shape[0], cache.shape[2] - latent_dim
    assert cache.stride(2) == 1
    latents = torch.empty(num_reqs * num_keys, latent_dim, dtype=cache.dtype, device=cache.device)
    rope = torch.empty(num_reqs * num_keys, rope_dim, dtype=cache.dtype, device=cache.device)
    _gather_kernel[(-(-num_keys // _KEYS_AT_ONCE), num_reqs)](
        (cache, cache.stride(0), cache.stride(1)),
        (requests.seq_lens, requests.block_table, requests.block_table.stride(0), requests.seq_starts),
        latents,
        rope,
        first_key,
        num_keys,
        LATENT=latent_dim,
        ROPE=rope_dim,
        PAGE_SIZE=cache.shape[1],
        BLOCK_L=next_power_of_2(latent_dim),
        BLOCK_R=next_power_of_2(rope_dim),
        BLOCK_K=_KEYS_AT_ONCE,
        STARTS=requests.seq_starts is not None,
        num_warps=4,
    )
    return latents, rope


@jit
def _turned(low, high, c, s, kind: tl.constexpr):
    """Rotated halves, rounded as the result of a rotation in the model's type would be."""
    return (low * c - high * s).to(kind), (high * c + low * s).to(kind)


@jit
def _store_kernel(
    new,  # q_rope, latents, gain, cos, sin
    strides,  # of tokens and heads of q_rope, of tokens of latents, of pages and slots of the cache
    cache,
    page_ids,
    offsets,
    out,
    eps,
    NUM_HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    q, latents, gain, cos, sin = new
    q_token, q_head, latent_token, page_stride, slot_stride = strides
    kind: tl.constexpr = out.dtype.element_ty
    to = cache + tl.load(page_ids + token) * page_stride + tl.load(offsets + token) * slot_stride
    latent = latents + token * latent_token
    i = tl.arange(0, BLOCK_L)
    exists = i < LATENT
    value = tl.load(latent + i, mask=exists, other=0.0).to(tl.float32)
    factor = tl.load(gain + i, mask=exists, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / LATENT + eps)
    normed = (value * scale * factor).to(kind)
    tl.store(to + i, normed.to(cache.dtype.element_ty), mask=exists)
    h = tl.arange(0, BLOCK_H)
    turns = h < HALF
    c = tl.load(cos + token * 2 * HALF + h, mask=turns, other=0.0)
    s = tl.load(sin + token * 2 * HALF + HALF + h, mask=turns, other=0.0)
    apart: tl.constexpr = 1 if INTERLEAVED else HALF
    place = h * 2 if INTERLEAVED else h
    low = tl.load(latent + LATENT + place, mask=turns, other=0.0)
    high = tl.load(latent + LATENT + apart + place, mask=turns, other=0.0)
    low, high = _turned(low, high, c, s, kind)
    tl.store(to + LATENT + h, low.to(cache.dtype.element_ty), mask=turns)
    tl.store(to + LATENT + HALF + h, high.to(cache.dtype.element_ty), mask=turns)
    if NUM_HEADS > 0:
        n = tl.arange(0, BLOCK_N)[:, None]
        there = (n < NUM_HEADS) & turns[None, :]
        from_q = q + token * q_token + n * q_head + place[None, :]
        first = tl.load(from_q, mask=there, other=0.0)
        second = tl.load(from_q + apart, mask=there, other=0.0)
        first, second = _turned(first, second, c[None, :], s[None, :], kind)
        to_q = out + (token * NUM_HEADS + n) * 2 * HALF + h[None, :]
        tl.store(to_q, first, mask=there)
        tl.store(to_q + HALF, second, mask=there)


@jit
def _gather_kernel(
    cached,  # entries, the stride of pages and that of slots
    tables,  # seq_lens, block_table, its stride, seq_starts if there are
    latents,
    rope,
    first_key,
    num_keys,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STARTS: tl.constexpr,
):
    cache, page_stride, slot_stride = cached
    seq_lens, block_table, table_stride, seq_starts = tables
    request = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    is_row, slot = k < num_keys, first_key + k
    there = is_row & (slot < tl.load(seq_lens + request))
    if STARTS:
        there = there & (slot >= tl.load(seq_starts + request))
    page = tl.load(block_table + request * table_stride + slot // PAGE_SIZE, mask=there, other=0).to(tl.int64)
    entry = (cache + page * page_stride + (slot % PAGE_SIZE) * slot_stride)[:, None]
    i, r = tl.arange(0, BLOCK_L)[None, :], tl.arange(0, BLOCK_R)[None, :]
    row = (request * num_keys + k)[:, None]
    value = tl.load(entry + i, mask=there[:, None] & (i < LATENT), other=0.0)
    tl.store(latents + row * LATENT + i, value, mask=is_row[:, None] & (i < LATENT))
    value = tl.load(entry + LATENT + r, mask=there[:, None] & (r < ROPE), other=0.0)
    tl.store(rope + row * ROPE + r, value, mask=is_row[:, None] & (r < ROPE))
