"""Rotary embedding of queries and keys, and the write of keys and values into the paged cache, in one operation.

What depends only on the step, not on the layer, is computed once: ``rotation_and_slots``.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation
from slipstream.kernels import native
from slipstream.kernels.native.records import CACHED_KINDS
from slipstream.kernels.native.step import RotationRecord, compiled, in_c, record
from slipstream.kernels.triton_jit import (
    early_start,
    jit,
    let_next_start,
    next_power_of_2,
    runs_triton,
    tl,
    wait_for_last,
)

_HEADS_AT_ONCE = 8  # of a token, in one program


def _rotation_shape(cos_sin: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[TensorSpec, TensorSpec]:
    spec = TensorSpec((positions.shape[0], 1, 2 * cos_sin.shape[2]), torch.promote_types(dtype, torch.float32))
    return spec, spec


@operation(_rotation_shape)
def rotation(
    cos_sin: Tensor,  # [max_position, 2, rotary_dim / 2] float32
    positions: Tensor,  # [num_tokens] int64
    dtype: torch.dtype,  # of the model; an angle is kept in float32 at least
) -> tuple[Tensor, Tensor]:  # cosines and signed sines, [num_tokens, 1, rotary_dim] each
    dtype = torch.promote_types(dtype, torch.float32)
    if runs_triton(cos_sin):
        return _launch_rotation(cos_sin, positions, dtype, None, 0, 1)
    cos, sin = cos_sin.index_select(0, positions).to(dtype).unsqueeze(1).unbind(2)
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def _rotation_and_slots_shape(
    cos_sin: Tensor, positions: Tensor, dtype: torch.dtype, slot_mapping: Tensor
) -> tuple[TensorSpec, TensorSpec, TensorSpec, TensorSpec]:
    slots = TensorSpec(tuple(slot_mapping.shape), torch.int64)
    return *_rotation_shape(cos_sin, positions, dtype), slots, slots


@operation(_rotation_and_slots_shape)
def rotation_and_slots(
    cos_sin: Tensor,  # [max_position, 2, rotary_dim / 2] float32
    positions: Tensor,  # [num_tokens] int64
    dtype: torch.dtype,  # of the model
    slot_mapping: Tensor,  # [num_tokens] int64; -1 for tokens that are not stored
    num_pages: int,  # of the cache's memory; the last one takes what is never read
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # of rotation; page and offset of each token
    if runs_triton(cos_sin):
        pages, offsets = torch.empty_like(slot_mapping), torch.empty_like(slot_mapping)
        slots, wide = (slot_mapping, pages, offsets), torch.promote_types(dtype, torch.float32)
        turn = _launch_rotation(cos_sin, positions, wide, slots, num_pages - 1, page_size)
        return *turn, pages, offsets
    stored = torch.where(slot_mapping >= 0, slot_mapping, (num_pages - 1) * page_size)
    pages = stored // page_size
    return *rotation.body(cos_sin, positions, dtype), pages, stored - pages * page_size


@in_c(rotation_and_slots)
def _rotation_in_c(
    cos_sin: Tensor,
    positions: Tensor,
    dtype: torch.dtype,
    slot_mapping: Tensor,
    num_pages: int,
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if torch.promote_types(dtype, torch.float32) is not torch.float32 or not cos_sin.is_contiguous():
        return rotation_and_slots.body(cos_sin, positions, dtype, slot_mapping, num_pages, page_size)
    num_tokens, half = positions.shape[0], cos_sin.shape[2]
    turn = torch.empty(2, num_tokens, 1, 2 * half).unbind()
    places = torch.empty(2, num_tokens, dtype=torch.int64).unbind()
    sizes = (num_tokens, half, num_pages - 1, page_size, cos_sin.shape[0])
    if compiled().slip_rotation_and_slots(
        record(RotationRecord, cos_sin, positions, slot_mapping, *turn, *places, *sizes)
    ):
        raise IndexError("a position is beyond the table of rotations")
    return *turn, *places  # type: ignore[return-value]


def _launch_rotation(
    cos_sin: Tensor,
    positions: Tensor,
    dtype: torch.dtype,
    slots: tuple[Tensor, Tensor, Tensor] | None,
    spare_page: int,
    page_size: int,
) -> tuple[Tensor, Tensor]:
    num_tokens, half = positions.shape[0], cos_sin.shape[2]
    cos, sin = (torch.empty(num_tokens, 1, 2 * half, dtype=dtype, device=cos_sin.device) for _ in range(2))
    _rotation_kernel[(num_tokens,)](
        cos_sin,
        positions,
        cos,
        sin,
        half,
        (positions,) * 3 if slots is None else slots,
        spare_page,
        SLOTS=slots is not None,
        PAGE_SIZE=page_size,
        BLOCK=next_power_of_2(half),
        num_warps=1,
        **early_start(cos_sin),
    )
    return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + rotary_dim / 2) of the leading rotary_dim entries; the rest is unchanged."""
    rotary_dim = cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        return torch.cat([rotate(x[..., :rotary_dim], cos, sin), x[..., rotary_dim:]], dim=-1)
    half = rotary_dim // 2
    swapped = torch.cat([x[..., half:], x[..., :half]], dim=-1)
    return (x * cos).addcmul_(swapped, sin)


class TokenPlaces(NamedTuple):
    """How a step's tokens are rotated, and where they are stored: the same in all layers."""

    cos: Tensor  # [num_tokens, 1, rotary_dim], from rotation
    sin: Tensor  # [num_tokens, 1, rotary_dim], from rotation
    page_ids: Tensor  # [num_tokens] int64, from rotation_and_slots
    offsets: Tensor  # [num_tokens] int64, from rotation_and_slots


class HeadNorms(NamedTuple):
    """Norms over each head of queries and keys, before they are rotated."""

    query: Tensor  # [head_dim]
    key: Tensor  # [head_dim]
    eps: float


class NewTokens(NamedTuple):
    """A step's tokens in one layer, before they are in the cache. Heads are a separate axis."""

    q: Tensor  # [num_tokens, num_heads, head_dim]
    k: Tensor  # [num_tokens, num_kv_heads, head_dim]
    v: Tensor  # [num_tokens, num_kv_heads, head_dim]
    cos: Tensor  # [num_tokens, 1, rotary_dim], from rotation
    sin: Tensor  # [num_tokens, 1, rotary_dim], from rotation
    page_ids: Tensor  # [num_tokens] int64, from rotation_and_slots
    offsets: Tensor  # [num_tokens] int64, from rotation_and_slots
    norms: HeadNorms | None = None  # that are still to be applied


@operation(like="new.q", writes=("kv_cache",))
def rope_and_cache(
    new: NewTokens,  # heads are normed already
    kv_cache: Tensor,  # [num_pages, 2, num_kv_heads, page_size, head_dim]; rounds to the nearest of its type
) -> Tensor:  # rotated queries
    assert new.norms is None
    if runs_triton(kv_cache):
        return _rope_and_cache_triton(new, kv_cache)
    q, k, v, cos, sin, page_ids, offsets, _ = new
    is_known = kv_cache.dtype in CACHED_KINDS
    if is_known and (lib := native.usable(k)) is not None and all(_rows_are_dense(t) for t in (q, k, v)):
        return _rope_and_cache_native(lib, new, kv_cache)
    num_heads = q.shape[1]
    turned = rotate(torch.cat([q, k], dim=1).to(cos.dtype), cos, sin).to(q.dtype)
    kv = torch.stack([turned[:, num_heads:], v], dim=1).to(kv_cache.dtype)
    kv_cache[page_ids, :, :, offsets] = kv
    return turned[:, :num_heads]


def _rows_are_dense(x: Tensor) -> bool:
    """Heads of a token are contiguous; tokens may be strided, as in slices of a joint projection."""
    return x.stride(2) == 1 and x.stride(1) == x.shape[2]


def _rope_and_cache_native(lib: ctypes.CDLL, new: NewTokens, kv_cache: Tensor) -> Tensor:
    q, k, v, cos, sin, page_ids, offsets, _ = new
    num_tokens, num_heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype)
    tokens = (q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0))
    step = [x.data_ptr() for x in (cos, sin, kv_cache, page_ids, offsets, out)]
    sizes = (num_tokens, num_heads, k.shape[1], head_dim, cos.shape[-1], kv_cache.shape[3])
    lib.slip_rope_and_cache(*tokens, *step, *sizes, CACHED_KINDS[kv_cache.dtype])
    return out


def _rope_and_cache_triton(new: NewTokens, kv_cache: Tensor) -> Tensor:
    q, k, v = new.q, new.k, new.v
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, rotary_dim = k.shape[1], new.cos.shape[-1]
    assert all(x.stride(2) == 1 for x in (q, k, v))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _rope_kernel[(num_tokens, -(-(num_heads + num_kv_heads) // _HEADS_AT_ONCE))](
        q,
        k,
        v,
        new.cos,
        new.sin,
        kv_cache,
        new.page_ids,
        new.offsets,
        out,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        kv_cache.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF=rotary_dim // 2,
        PAGE_SIZE=kv_cache.shape[3],
        HEADS=_HEADS_AT_ONCE,
        BLOCK_HALF=next_power_of_2(rotary_dim // 2),
        BLOCK_REST=next_power_of_2(max(1, head_dim - rotary_dim)),
        BLOCK_DIM=next_power_of_2(head_dim),
        num_warps=2,
    )
    return out


@jit
def _rotation_kernel(
    cos_sin,
    positions,
    cos,
    sin,
    half,
    slots,  # slot_mapping, page_ids, offsets, if requested
    spare_page,
    SLOTS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_last(EARLY)
    let_next_start(EARLY)
    token = tl.program_id(0).to(tl.int64)
    if SLOTS:
        slot = tl.load(slots[0] + token)
        tl.store(slots[1] + token, tl.where(slot >= 0, slot // PAGE_SIZE, spare_page))
        tl.store(slots[2] + token, tl.where(slot >= 0, slot % PAGE_SIZE, 0))
    i = tl.arange(0, BLOCK)
    exists = i < half
    base = cos_sin + tl.load(positions + token) * 2 * half + i
    c = tl.load(base, mask=exists, other=0.0).to(cos.dtype.element_ty)
    s = tl.load(base + half, mask=exists, other=0.0).to(cos.dtype.element_ty)
    element = token * 2 * half + i
    tl.store(cos + element, c, mask=exists)
    tl.store(cos + element + half, c, mask=exists)
    tl.store(sin + element, -s, mask=exists)
    tl.store(sin + element + half, s, mask=exists)


@jit
def _rope_kernel(
    q,
    k,
    v,
    cos,
    sin,
    kv_cache,
    page_ids,
    offsets,
    out,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    page_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """A few heads of one token: query heads first, then key heads with their values."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    kv_head = head - NUM_HEADS
    is_q, is_kv = head < NUM_HEADS, (kv_head >= 0) & (kv_head < NUM_KV_HEADS)
    from_q, from_k = q + token * q_token + head * q_head, k + token * k_token + kv_head * k_head
    to_q = out + (token * NUM_HEADS + head) * HEAD_DIM
    page = kv_cache + tl.load(page_ids + token) * page_stride + tl.load(offsets + token) * HEAD_DIM
    to_k = page + kv_head * PAGE_SIZE * HEAD_DIM
    to_v = page + (NUM_KV_HEADS + kv_head) * PAGE_SIZE * HEAD_DIM

    i = tl.arange(0, BLOCK_HALF)[None, :]
    turns = i < HALF
    c = tl.load(cos + token * 2 * HALF + i, mask=turns, other=0.0)
    s = tl.load(sin + token * 2 * HALF + HALF + i, mask=turns, other=0.0)
    first = tl.load(from_q + i, mask=is_q & turns, other=0.0) + tl.load(from_k + i, mask=is_kv & turns, other=0.0)
    i += HALF
    second = tl.load(from_q + i, mask=is_q & turns, other=0.0) + tl.load(from_k + i, mask=is_kv & turns, other=0.0)
    i -= HALF
    a = first * c - second * s
    b = second * c + first * s
    tl.store(to_q + i, a.to(out.dtype.element_ty), mask=is_q & turns)
    tl.store(to_q + HALF + i, b.to(out.dtype.element_ty), mask=is_q & turns)
    tl.store(to_k + i, a.to(out.dtype.element_ty).to(kv_cache.dtype.element_ty), mask=is_kv & turns)
    tl.store(to_k + HALF + i, b.to(out.dtype.element_ty).to(kv_cache.dtype.element_ty), mask=is_kv & turns)
    if HEAD_DIM > 2 * HALF:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        stays = rest < HEAD_DIM
        tl.store(to_q + rest, tl.load(from_q + rest, mask=is_q & stays), mask=is_q & stays)
        kept = tl.load(from_k + rest, mask=is_kv & stays).to(kv_cache.dtype.element_ty)
        tl.store(to_k + rest, kept, mask=is_kv & stays)
    d = tl.arange(0, BLOCK_DIM)[None, :]
    is_v = is_kv & (d < HEAD_DIM)
    values = tl.load(v + token * v_token + kv_head * v_head + d, mask=is_v).to(kv_cache.dtype.element_ty)
    tl.store(to_v + d, values, mask=is_v)
