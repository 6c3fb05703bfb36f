"""Mixtures of experts: which experts work on a token, and their weighted work.

A token's result depends on that token alone: its experts add up in the order of their numbers, whatever the batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation, spec_of


def _route_shape(logits: Tensor, num_chosen: int, renormalise: bool) -> tuple[TensorSpec, TensorSpec]:
    shape = (logits.shape[0], num_chosen)
    return TensorSpec(shape, torch.promote_types(logits.dtype, torch.float32)), TensorSpec(shape, torch.int64)


@operation(_route_shape)
def route_tokens(
    logits: Tensor,  # [num_tokens, num_experts]
    num_chosen: int,
    renormalise: bool,
) -> tuple[Tensor, Tensor]:  # weights [num_tokens, num_chosen] in at least float32; expert ids of the same shape, int64
    probs = torch.softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    # Sorted and not `topk`, which leaves the order of equal values open: here the lower number wins.
    weights, expert_ids = probs.sort(dim=-1, descending=True, stable=True)
    weights, expert_ids = weights[:, :num_chosen], expert_ids[:, :num_chosen]
    if renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, expert_ids


def _experts_shape(x: Tensor, weights: Tensor, expert_ids: Tensor, gate_up: Tensor, down: Tensor) -> TensorSpec:
    return spec_of(x)


@operation(_experts_shape)
def expert_mlp(
    x: Tensor,  # [num_tokens, hidden]
    weights: Tensor,  # [num_tokens, num_chosen]
    expert_ids: Tensor,  # [num_tokens, num_chosen], no expert twice in a row
    gate_up: Tensor,  # [num_experts, 2 * intermediate, hidden], gate first
    down: Tensor,  # [num_experts, hidden, intermediate]
) -> Tensor:  # [num_tokens, hidden]
    out = torch.zeros(x.shape, dtype=weights.dtype, device=x.device)
    for expert in torch.unique(expert_ids).tolist():
        tokens, ranks = torch.where(expert_ids == expert)
        gate, up = F.linear(x[tokens], gate_up[expert]).chunk(2, dim=-1)
        part = F.linear(F.silu(gate) * up, down[expert])
        out.index_add_(0, tokens, part * weights[tokens, ranks].unsqueeze(-1))
    return out.to(x.dtype)
