"""Rotary embedding of queries and keys, and the write of keys and values into the paged cache, in one operation."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + rotary_dim / 2) of the leading rotary_dim entries; the rest passes through."""
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1).to(x.dtype), sin.unsqueeze(1).to(x.dtype)
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat([*turned, x[..., 2 * half :]], dim=-1)


def _shape(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos_sin: Tensor, kv_cache: Tensor, slot_mapping: Tensor
) -> TensorSpec:
    return TensorSpec(tuple(q.shape), q.dtype)


@operation(_shape, writes=("kv_cache",))
def rope_and_cache(
    q: Tensor,  # [num_tokens, num_heads, head_dim]
    k: Tensor,  # [num_tokens, num_kv_heads, head_dim]
    v: Tensor,  # [num_tokens, num_kv_heads, head_dim]
    positions: Tensor,  # [num_tokens] int64
    cos_sin: Tensor,  # [max_position, 2, rotary_dim / 2]
    kv_cache: Tensor,  # [num_pages, 2, num_kv_heads, page_size, head_dim]
    slot_mapping: Tensor,  # [num_tokens] int64; -1 writes nothing
) -> Tensor:  # rotated queries
    cos, sin = cos_sin[positions].unbind(1)
    k = rotate(k, cos, sin)
    kept = slot_mapping >= 0
    if not bool(kept.all()):
        slot_mapping, k, v = slot_mapping[kept], k[kept], v[kept]
    page_size = kv_cache.shape[3]
    page_ids, offsets = slot_mapping // page_size, slot_mapping % page_size
    kv_cache[:, 0][page_ids, :, offsets] = k.to(kv_cache.dtype)
    kv_cache[:, 1][page_ids, :, offsets] = v.to(kv_cache.dtype)
    return rotate(q, cos, sin)
