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
    out = torch.empty_like(x)
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half : 2 * half]).addcmul_(first, sin)
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out


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
    num_heads, page_size = q.shape[1], kv_cache.shape[3]
    cos, sin = cos_sin.index_select(0, positions).unbind(1)
    turned = rotate(torch.cat([q, k], dim=1), cos, sin)
    kv = torch.stack([turned[:, num_heads:], v], dim=1).to(kv_cache.dtype)
    kept = slot_mapping >= 0
    if not bool(kept.all()):
        slot_mapping, kv = slot_mapping[kept], kv[kept]
    kv_cache[slot_mapping // page_size, :, :, slot_mapping % page_size] = kv
    return turned[:, :num_heads]
