"""Mixtures of experts: the choice of experts for a token, and the weighted sum of their outputs.

A token's result depends on that token alone: its experts are summed in a fixed order, whatever the batch. The
definition sums them by number, the kernel by rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation
from slipstream.kernels.linear.grouped_gemm import launch_experts
from slipstream.kernels.triton_jit import jit, next_power_of_2, runs_triton, tl


def _route_shape(logits: Tensor, num_chosen: int) -> tuple[TensorSpec, TensorSpec]:
    shape = (logits.shape[0], num_chosen)
    return TensorSpec(shape, torch.promote_types(logits.dtype, torch.float32)), TensorSpec(shape, torch.int64)


@operation(_route_shape)
def route_tokens(
    logits: Tensor,  # [num_tokens, num_experts]
    num_chosen: int,
    renormalise: bool,
) -> tuple[Tensor, Tensor]:  # weights [num_tokens, num_chosen] in at least float32; expert ids of the same shape, int64
    if runs_triton(logits):
        return _launch_route(logits, num_chosen, renormalise)
    probs = torch.softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    # Sorted instead of `topk`, whose order of equal values is undefined: here the lower number wins.
    weights, expert_ids = probs.sort(dim=-1, descending=True, stable=True)
    weights, expert_ids = weights[:, :num_chosen], expert_ids[:, :num_chosen]
    if renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, expert_ids


def _launch_route(logits: Tensor, num_chosen: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    logits = logits.contiguous()
    num_tokens, num_experts = logits.shape
    if num_chosen > num_experts:
        raise ValueError(f"{num_chosen} experts cannot be chosen of {num_experts}")
    weights = logits.new_empty(num_tokens, num_chosen, dtype=torch.promote_types(logits.dtype, torch.float32))
    expert_ids = logits.new_empty(num_tokens, num_chosen, dtype=torch.int64)
    _route_kernel[(num_tokens,)](
        logits,
        weights,
        expert_ids,
        num_experts,
        num_chosen,
        RENORMALISE=renormalise,
        BLOCK=next_power_of_2(num_experts),
        RANKS=next_power_of_2(num_chosen),
        num_warps=1,
    )
    return weights, expert_ids


@operation(like="x")
def expert_mlp(
    x: Tensor,  # [num_tokens, hidden]
    weights: Tensor,  # [num_tokens, num_chosen]
    expert_ids: Tensor,  # [num_tokens, num_chosen], no expert twice in a row
    gate_up: Tensor,  # [num_experts, 2 * intermediate, hidden], gate first
    down: Tensor,  # [num_experts, hidden, intermediate]
) -> Tensor:  # [num_tokens, hidden]
    if runs_triton(x):
        return launch_experts(x, weights, expert_ids, gate_up, down)
    weights = weights.to(torch.promote_types(weights.dtype, x.dtype))
    out = torch.zeros(x.shape, dtype=weights.dtype, device=x.device)
    for expert in torch.unique(expert_ids).tolist():
        tokens, ranks = torch.where(expert_ids == expert)
        gate, up = F.linear(x[tokens], gate_up[expert]).chunk(2, dim=-1)
        part = F.linear(F.silu(gate) * up, down[expert])
        out.index_add_(0, tokens, part * weights[tokens, ranks].unsqueeze(-1))
    return out.to(x.dtype)


@jit
def _route_kernel(
    logits,
    weights,
    expert_ids,
    num_experts,
    num_chosen,
    RENORMALISE: tl.constexpr,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    exists = expert < num_experts
    logit = tl.load(logits + token * num_experts + expert, mask=exists, other=float("-inf")).to(tl.float32)
    odds = tl.where(exists, tl.exp(logit - tl.max(logit, 0)), 0.0)
    probs = odds / tl.sum(odds, 0)
    # NaN counts as the largest value, as it does in sorting: a valid expert is always found.
    key = tl.where(probs == probs, probs, 2.0)
    key = tl.where(exists, key, -1.0)
    rank = tl.arange(0, RANKS)
    chosen = tl.zeros([RANKS], tl.int32)
    chosen_probs = tl.zeros([RANKS], tl.float32)
    for i in range(num_chosen):
        best = tl.min(tl.where(key == tl.max(key, 0), expert, BLOCK), 0)
        chosen = tl.where(rank == i, best, chosen)
        chosen_probs = tl.where(rank == i, tl.sum(tl.where(expert == best, probs, 0.0), 0), chosen_probs)
        key = tl.where(expert == best, -1.0, key)
    if RENORMALISE:
        chosen_probs = chosen_probs / tl.sum(chosen_probs, 0)
    to = token * num_chosen + rank
    tl.store(weights + to, chosen_probs, mask=rank < num_chosen)
    tl.store(expert_ids + to, chosen.to(tl.int64), mask=rank < num_chosen)
