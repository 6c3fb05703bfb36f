"""Attention of a head's draft steps, over whole texts at once.

Index t attends to the first step's keys up to t, and of every later step to the key at t alone, which is its own
earlier draft. The first part is causal attention, for which torch has fused kernels; the part over the drafts is merged
with it by the log-sum-exp of both. Given the merged output and log-sum-exp, the fused kernels' backward pass is correct
for their part unchanged, since it needs nothing else of the other keys.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

KeyValue = tuple[Tensor, Tensor]  # [rows, length, kv_heads, head_dim] each


def draft_attention(q: Tensor, past: list[KeyValue]) -> Tensor:  # q: [rows, length, heads, head_dim]
    """Attention of the last step in ``past``."""
    group, scale = q.shape[2] // past[0][0].shape[2], q.shape[3] ** -0.5
    keys, values = (part.repeat_interleave(group, dim=2) for part in past[0])
    if len(past) == 1:
        q, keys, values = (part.transpose(1, 2) for part in (q, keys, values))
        return F.scaled_dot_product_attention(q, keys, values, is_causal=True, scale=scale).transpose(1, 2)
    own_keys, own_values = (torch.stack([pair[side] for pair in past[1:]], dim=3) for side in (0, 1))
    attend = _Joined.apply if _has_fused_kernel(q) else _attend_plainly
    out: Tensor = attend(q, keys, values, own_keys, own_values, scale)
    return out


def _has_fused_kernel(q: Tensor) -> bool:
    if q.device.type == "cuda":
        return q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return q.device.type == "cpu"


def _attend_plainly(
    q: Tensor,  # [rows, length, heads, head_dim], as keys and values
    keys: Tensor,
    values: Tensor,
    own_keys: Tensor,  # [rows, length, kv_heads, steps, head_dim]
    own_values: Tensor,
    scale: float,
) -> Tensor:
    """With all scores in memory."""
    length, wide = q.shape[1], torch.promote_types(q.dtype, torch.float32)
    ahead = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1).unsqueeze(1)
    scores = torch.einsum("bthd,bshd->bths", q, keys).masked_fill(ahead, float("-inf"))
    own = _by_group(q, own_keys) @ own_keys.flatten(0, 2).transpose(1, 2)
    weights = torch.cat([scores, own.view(*q.shape[:3], -1)], dim=-1) * scale
    weights = weights.softmax(dim=-1, dtype=wide).to(q.dtype)
    mixed = _by_group(weights[..., length:], own_keys) @ own_values.flatten(0, 2)
    return torch.einsum("bths,bshd->bthd", weights[..., :length], values) + mixed.view_as(q)


class _Joined(torch.autograd.Function):
    """The same with a fused kernel. The drafts' scores are [rows * length * kv_heads, group, steps] here."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor, scale: float
    ) -> Tensor:
        own_k, own_v = own_keys.flatten(0, 2), own_values.flatten(0, 2)
        out, log_sums, *ctx.rest = _causal(q, keys, values, scale)
        before = _by_group(log_sums.transpose(1, 2).unsqueeze(-1), own_keys)
        scores = (_by_group(q, own_keys) @ own_k.transpose(1, 2)).to(before.dtype) * scale
        joint = torch.logaddexp(before, scores.logsumexp(dim=-1, keepdim=True))
        weights = (scores - joint).exp().to(q.dtype)
        mixed = _by_group(out.transpose(1, 2), own_keys) * (before - joint).exp() + weights @ own_v
        mixed = mixed.to(q.dtype).view_as(q)
        ctx.scale = scale
        ctx.save_for_backward(q, keys, values, own_keys, own_values, mixed, joint, weights)
        return mixed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, keys, values, own_keys, own_values, out, joint, weights = ctx.saved_tensors
        own_k, own_v = own_keys.flatten(0, 2), own_values.flatten(0, 2)
        log_sums = joint.view(q.shape[:3]).transpose(1, 2).contiguous()
        q_grad, key_grad, value_grad = _causal_backward(grads[0], q, keys, values, out, log_sums, ctx.scale, ctx.rest)
        grad = _by_group(grads[0], own_keys)
        centre = (grad * _by_group(out, own_keys)).sum(dim=-1, keepdim=True, dtype=joint.dtype)
        score_grads = (weights * (grad @ own_v.transpose(1, 2) - centre) * ctx.scale).to(q.dtype)
        q_grad = q_grad + (score_grads @ own_k).view_as(q)
        own_key_grad = score_grads.transpose(1, 2) @ _by_group(q, own_keys)
        own_value_grad = weights.transpose(1, 2) @ grad
        return q_grad, key_grad, value_grad, own_key_grad.view_as(own_keys), own_value_grad.view_as(own_values), None


def _by_group(x: Tensor, own_keys: Tensor) -> Tensor:
    """[rows, length, heads, n] as [rows * length * kv_heads, group, n]: heads that share keys are adjacent."""
    return x.reshape(own_keys.shape[:3].numel(), -1, x.shape[-1])


def _causal(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Any, ...]:
    """The result, [rows, heads, length, head_dim], its log-sum-exp, and what else the backward pass needs."""
    arrays = (part.transpose(1, 2) for part in (q, keys, values))
    found: tuple[Any, ...]
    if q.device.type == "cpu":
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*arrays, 0.0, True, scale=scale)
        return found
    found = torch.ops.aten._scaled_dot_product_flash_attention(*arrays, 0.0, True, False, scale=scale)
    return found[:8]  # the last is for debugging


def _causal_backward(
    grad: Tensor, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, log_sums: Tensor, scale: float, rest: Any
) -> tuple[Tensor, ...]:
    arrays = (*(part.transpose(1, 2) for part in (grad, q, keys, values, out)), log_sums)
    if q.device.type == "cpu":
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*arrays, 0.0, True, scale=scale)
    else:
        lengths, seeds = rest[:4], rest[4:]
        found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *arrays, *lengths, 0.0, True, *seeds, scale=scale
        )
    return tuple(part.transpose(1, 2) for part in found)
