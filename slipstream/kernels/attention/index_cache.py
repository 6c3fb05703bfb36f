"""The cache of a sparse indexer: of each token one key, without heads, that all heads of its queries are compared with.

Keys lie in the same pages and slots as those of the attention that the indexer chooses for. They are normed with a
mean and a bias; of keys and queries the leading entries are rotated.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.device.operation import operation
from slipstream.kernels.attention.rope_cache import rotate
from slipstream.kernels.triton_jit import jit, next_power_of_2, runs_triton, tl

_HEADS_AT_ONCE = 16  # of a token, in one program


class NewIndexKeys(NamedTuple):
    """A step's tokens in one indexer, as the projections leave them."""

    q: Tensor  # [num_tokens, num_heads, dim], not rotated; without heads: to store only
    k: Tensor  # [num_tokens, dim], neither normed nor rotated
    weight: Tensor  # [dim], of the norm over keys
    bias: Tensor  # [dim]
    eps: float
    cos: Tensor  # [num_tokens, 1, rope_dim], from rotation
    sin: Tensor  # [num_tokens, 1, rope_dim], from rotation
    page_ids: Tensor  # [num_tokens] int64, from rotation_and_slots
    offsets: Tensor  # [num_tokens] int64, from rotation_and_slots
    # Whether pairs that turn together are neighbours; rotated they are half of rope_dim apart, in queries and keys.
    interleaved: bool = False


@operation(like="new.q", writes=("keys",))
def store_index_keys(
    new: NewIndexKeys,
    keys: Tensor,  # [num_pages, page_size, dim]
) -> Tensor:  # [num_tokens, num_heads, dim], rotated
    if runs_triton(keys):
        return _launch(new, keys)
    q, k, weight, bias, eps, cos, sin, page_ids, offsets, interleaved = new
    kind, rope_dim = torch.promote_types(k.dtype, torch.float32), cos.shape[2]
    normed = F.layer_norm(k.to(kind), k.shape[1:], weight.to(kind), bias.to(kind), eps).to(k.dtype)
    parts = torch.cat([q, normed.unsqueeze(1)], dim=1)
    if interleaved:
        parts = torch.cat([parts[..., 0:rope_dim:2], parts[..., 1:rope_dim:2], parts[..., rope_dim:]], dim=-1)
    turned = rotate(parts.to(cos.dtype), cos, sin).to(q.dtype)
    keys[page_ids, offsets] = turned[:, -1].to(keys.dtype)
    return turned[:, :-1].contiguous()


def _launch(new: NewIndexKeys, keys: Tensor) -> Tensor:
    q, k = new.q, new.k
    num_tokens, num_heads, dim = q.shape
    assert q.stride(2) == k.stride(1) == keys.stride(2) == 1 and new.cos.is_contiguous() and new.sin.is_contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _store_kernel[(num_tokens, max(1, -(-num_heads // _HEADS_AT_ONCE)))](
        (q, k, new.weight, new.bias, new.cos, new.sin),
        (q.stride(0), q.stride(1), k.stride(0), keys.stride(0), keys.stride(1)),
        keys,
        new.page_ids,
        new.offsets,
        out,
        new.eps,
        NUM_HEADS=num_heads,
        DIM=dim,
        HALF=new.cos.shape[2] // 2,
        INTERLEAVED=new.interleaved,
        BLOCK_N=min(_HEADS_AT_ONCE, next_power_of_2(max(1, num_heads))),
        BLOCK_D=next_power_of_2(dim),
        BLOCK_H=next_power_of_2(new.cos.shape[2] // 2),
        num_warps=4,
    )
    return out


@jit
def _turned(low, high, c, s, kind: tl.constexpr):
    return (low * c - high * s).to(kind), (high * c + low * s).to(kind)


@jit
def _normed(k, weight, bias, i, exists, moments, kind: tl.constexpr):
    """Some entries of a key, rounded as the result of a norm in the model's type would be."""
    value = tl.load(k + i, mask=exists, other=0.0).to(tl.float32)
    w = tl.load(weight + i, mask=exists, other=0.0).to(tl.float32)
    b = tl.load(bias + i, mask=exists, other=0.0).to(tl.float32)
    return ((value - moments[0]) * moments[1] * w + b).to(kind)


@jit
def _store_kernel(
    new,  # q, k, weight, bias, cos, sin
    strides,  # of tokens and heads of q, of tokens of k, of pages and slots of the cache
    keys,
    page_ids,
    offsets,
    out,
    eps,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Some heads of a token; with the first of them its key."""
    token = tl.program_id(0).to(tl.int64)
    q, k, weight, bias, cos, sin = new
    q_token, q_head, k_token, page_stride, slot_stride = strides
    kind: tl.constexpr = out.dtype.element_ty
    apart: tl.constexpr = 1 if INTERLEAVED else HALF
    i, h = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_H)
    turns, stays = h < HALF, (i >= 2 * HALF) & (i < DIM)
    place = h * 2 if INTERLEAVED else h
    c = tl.load(cos + token * 2 * HALF + h, mask=turns, other=0.0)
    s = tl.load(sin + token * 2 * HALF + HALF + h, mask=turns, other=0.0)
    if tl.program_id(1) == 0:
        to = keys + tl.load(page_ids + token) * page_stride + tl.load(offsets + token) * slot_stride
        key = k + token * k_token
        value = tl.load(key + i, mask=i < DIM, other=0.0).to(tl.float32)
        mean = tl.sum(value, 0) / DIM
        away = tl.where(i < DIM, value - mean, 0.0)
        moments = (mean, tl.rsqrt(tl.sum(away * away, 0) / DIM + eps))
        rest = _normed(key, weight, bias, i, stays, moments, kind)
        tl.store(to + i, rest.to(keys.dtype.element_ty), mask=stays)
        low = _normed(key, weight, bias, place, turns, moments, kind)
        high = _normed(key, weight, bias, apart + place, turns, moments, kind)
        low, high = _turned(low, high, c, s, kind)
        tl.store(to + h, low.to(keys.dtype.element_ty), mask=turns)
        tl.store(to + HALF + h, high.to(keys.dtype.element_ty), mask=turns)
    if NUM_HEADS > 0:
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
        is_head = n < NUM_HEADS
        from_q, to_q = q + token * q_token + n * q_head, out + (token * NUM_HEADS + n) * DIM
        rest = tl.load(from_q + i[None, :], mask=is_head & stays[None, :], other=0.0)
        tl.store(to_q + i[None, :], rest, mask=is_head & stays[None, :])
        there = is_head & turns[None, :]
        first = tl.load(from_q + place[None, :], mask=there, other=0.0)
        second = tl.load(from_q + apart + place[None, :], mask=there, other=0.0)
        first, second = _turned(first, second, c[None, :], s[None, :], kind)
        tl.store(to_q + h[None, :], first, mask=there)
        tl.store(to_q + HALF + h[None, :], second, mask=there)
