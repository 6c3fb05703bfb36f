"""Rotary embedding of queries and keys, and the write of keys and values into the paged cache, in one operation.

What depends on the step alone, and not on the layer, is made once: ``rotation`` and ``cache_slots``.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation
from slipstream.kernels import native


def _rotation_shape(cos_sin: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[TensorSpec, TensorSpec]:
    spec = TensorSpec((positions.shape[0], 1, 2 * cos_sin.shape[2]), dtype)
    return spec, spec


@operation(_rotation_shape)
def rotation(
    cos_sin: Tensor,  # [max_position, 2, rotary_dim / 2] float32
    positions: Tensor,  # [num_tokens] int64
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # cosines and signed sines, [num_tokens, 1, rotary_dim] each
    cos, sin = cos_sin.index_select(0, positions).to(dtype).unsqueeze(1).unbind(2)
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def _slots_shape(slot_mapping: Tensor, num_pages: int, page_size: int) -> tuple[TensorSpec, TensorSpec]:
    spec = TensorSpec(tuple(slot_mapping.shape), torch.int64)
    return spec, spec


@operation(_slots_shape)
def cache_slots(
    slot_mapping: Tensor,  # [num_tokens] int64; -1 for tokens that are not to be stored
    num_pages: int,  # of the cache's memory; the last one takes what nobody is to read
    page_size: int,
) -> tuple[Tensor, Tensor]:  # page and offset of each token
    slots = torch.where(slot_mapping >= 0, slot_mapping, (num_pages - 1) * page_size)
    page_ids = slots // page_size
    return page_ids, slots - page_ids * page_size


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + rotary_dim / 2) of the leading rotary_dim entries; the rest passes through."""
    rotary_dim = cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        return torch.cat([rotate(x[..., :rotary_dim], cos, sin), x[..., rotary_dim:]], dim=-1)
    half = rotary_dim // 2
    swapped = torch.cat([x[..., half:], x[..., :half]], dim=-1)
    return (x * cos).addcmul_(swapped, sin)


def _shape(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, page_ids: Tensor, offsets: Tensor
) -> TensorSpec:
    return TensorSpec(tuple(q.shape), q.dtype)


@operation(_shape, writes=("kv_cache",))
def rope_and_cache(
    q: Tensor,  # [num_tokens, num_heads, head_dim]
    k: Tensor,  # [num_tokens, num_kv_heads, head_dim]
    v: Tensor,  # [num_tokens, num_kv_heads, head_dim]
    cos: Tensor,  # [num_tokens, 1, rotary_dim], from rotation
    sin: Tensor,  # [num_tokens, 1, rotary_dim], from rotation
    kv_cache: Tensor,  # [num_pages, 2, num_kv_heads, page_size, head_dim]
    page_ids: Tensor,  # [num_tokens] int64, from cache_slots
    offsets: Tensor,  # [num_tokens] int64, from cache_slots
) -> Tensor:  # rotated queries
    if (lib := native.usable(kv_cache)) is not None and all(_rows_are_dense(t) for t in (q, k, v)):
        return _rope_and_cache_native(lib, q, k, v, cos, sin, kv_cache, page_ids, offsets)
    num_heads = q.shape[1]
    turned = rotate(torch.cat([q, k], dim=1), cos, sin)
    kv = torch.stack([turned[:, num_heads:], v], dim=1).to(kv_cache.dtype)
    kv_cache[page_ids, :, :, offsets] = kv
    return turned[:, :num_heads]


def _rows_are_dense(x: Tensor) -> bool:
    """Heads of a token lie side by side; tokens may be further apart, as in slices of a joint projection."""
    return x.stride(2) == 1 and x.stride(1) == x.shape[2]


def _rope_and_cache_native(
    lib: ctypes.CDLL,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_cache: Tensor,
    page_ids: Tensor,
    offsets: Tensor,
) -> Tensor:
    num_tokens, num_heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype)
    tokens = (q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0))
    step = [x.data_ptr() for x in (cos, sin, kv_cache, page_ids, offsets, out)]
    sizes = (num_tokens, num_heads, k.shape[1], head_dim, cos.shape[-1], kv_cache.shape[3])
    lib.slip_rope_and_cache(*tokens, *step, *sizes)
    return out
