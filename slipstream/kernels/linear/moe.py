"""Mixtures of experts: the choice of experts for a token, and the weighted sum of their outputs.

A token's result depends on that token alone: its experts are summed in a fixed order, whatever the batch. The
definition sums them by number, the kernel by rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation
from slipstream.experts_config import Routing
from slipstream.kernels.linear.grouped_gemm import launch_experts
from slipstream.kernels.triton_jit import jit, next_power_of_2, runs_triton, tl

_LEAST_SUM = 1e-20  # added to a sum of weights, for sigmoids may all be zero; no softmax's sum is changed by it


def _route_shape(logits: Tensor, routing: Routing) -> tuple[TensorSpec, TensorSpec]:
    shape = (logits.shape[0], routing.num_chosen)
    return TensorSpec(shape, torch.promote_types(logits.dtype, torch.float32)), TensorSpec(shape, torch.int64)


@operation(_route_shape)
def route_tokens(
    logits: Tensor,  # [num_tokens, num_experts]
    bias: Tensor | None,  # [num_experts] float32
    routing: Routing,
) -> tuple[Tensor, Tensor]:  # weights [num_tokens, num_chosen] in at least float32; expert ids of the same shape, int64
    if runs_triton(logits):
        return _launch_route(logits, bias, routing)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = torch.softmax(logits, dim=-1) if routing.scoring == "softmax" else torch.sigmoid(logits)
    keys = scores if bias is None else scores + bias
    if routing.has_groups:
        # Masked by the lowest value, whatever the scoring: with the weights 0 that a softmax leaves to masked experts
        # it makes no difference which of them are chosen.
        keys = keys.masked_fill(~_in_kept_groups(keys, routing), -torch.inf)
    # Sorted instead of `topk`, whose order of equal values is undefined: here the lower number wins.
    expert_ids = keys.argsort(dim=-1, descending=True, stable=True)[:, : routing.num_chosen]
    weights = scores.gather(1, expert_ids)
    if routing.renormalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + _LEAST_SUM)
    return weights * routing.scale, expert_ids


def _in_kept_groups(keys: Tensor, routing: Routing) -> Tensor:
    """Whether an expert may be chosen: [num_tokens, num_experts] bool."""
    groups = keys.view(keys.shape[0], routing.num_groups, keys.shape[1] // routing.num_groups)
    scores = groups.amax(-1) if routing.group_score == "max" else groups.topk(2, dim=-1).values.sum(-1)
    kept_ids = scores.argsort(dim=-1, descending=True, stable=True)[:, : routing.num_kept_groups]
    is_kept = torch.zeros_like(scores, dtype=torch.bool).scatter(1, kept_ids, True)
    return is_kept.unsqueeze(-1).expand_as(groups).flatten(1)


def _launch_route(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    logits, num_chosen = logits.contiguous(), routing.num_chosen
    num_tokens, num_experts = logits.shape
    num_groups = routing.num_groups if routing.has_groups else 1
    size = num_experts // num_groups
    if num_chosen > num_experts:
        raise ValueError(f"{num_chosen} experts cannot be chosen of {num_experts}")
    if num_groups > 1 and (num_experts % num_groups or size < 2 or num_chosen > routing.num_kept_groups * size):
        raise ValueError(f"{num_chosen} of {num_experts} experts cannot be chosen in {num_groups} groups")
    weights = logits.new_empty(num_tokens, num_chosen, dtype=torch.promote_types(logits.dtype, torch.float32))
    expert_ids = logits.new_empty(num_tokens, num_chosen, dtype=torch.int64)
    _route_kernel[(num_tokens,)](
        logits,
        logits if bias is None else bias,
        weights,
        expert_ids,
        num_experts,
        num_chosen,
        num_groups,
        routing.num_kept_groups,
        routing.scale,
        SOFTMAX=routing.scoring == "softmax",
        BIASED=bias is not None,
        TOP2=routing.group_score == "top2",
        RENORMALISE=routing.renormalise,
        LEAST_SUM=_LEAST_SUM,
        GROUPS=next_power_of_2(num_groups),
        SIZE=next_power_of_2(size),
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
    bias,  # read if BIASED
    weights,
    expert_ids,
    num_experts,
    num_chosen,
    num_groups,
    num_kept_groups,
    scale,
    SOFTMAX: tl.constexpr,
    BIASED: tl.constexpr,
    TOP2: tl.constexpr,
    RENORMALISE: tl.constexpr,
    LEAST_SUM: tl.constexpr,
    GROUPS: tl.constexpr,  # padded, as is the SIZE of each; 1 where experts are not chosen within groups
    SIZE: tl.constexpr,
    RANKS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    BLOCK: tl.constexpr = GROUPS * SIZE
    place = tl.arange(0, BLOCK)  # in the order of experts, with gaps where groups are padded
    size = num_experts // num_groups
    if GROUPS == 1:
        expert = place
        exists = expert < num_experts
    else:
        expert = place // SIZE * size + place % SIZE
        exists = (place % SIZE < size) & (place // SIZE < num_groups)
    logit = tl.load(logits + token * num_experts + expert, mask=exists, other=float("-inf")).to(tl.float32)
    if SOFTMAX:
        odds = tl.where(exists, tl.exp(logit - tl.max(logit, 0)), 0.0)
        scores = odds / tl.sum(odds, 0)
    else:
        scores = tl.sigmoid(logit)
    key = scores
    if BIASED:
        # No key is below that of masked experts, which are below none but those that are taken already.
        key = scores + tl.load(bias + expert, mask=exists, other=0.0)
        key = tl.where(key < -3e38, -3e38, key)
    # NaN counts as the largest value, as it does in sorting: a valid expert is always found.
    key = tl.where(key == key, key, float("inf"))
    key = tl.where(exists, key, float("-inf"))
    if GROUPS > 1:
        is_kept = _kept_groups(tl.reshape(key, [GROUPS, SIZE]), num_groups, num_kept_groups, TOP2, GROUPS, SIZE)
        is_kept = tl.reshape(tl.broadcast_to(is_kept[:, None], [GROUPS, SIZE]), [BLOCK])
        key = tl.where(exists & (is_kept == 0), -3e38, key)
    rank = tl.arange(0, RANKS)
    chosen = tl.zeros([RANKS], tl.int32)
    chosen_scores = tl.zeros([RANKS], tl.float32)
    for i in range(num_chosen):
        best = tl.min(tl.where(key == tl.max(key, 0), place, BLOCK), 0)
        chosen = tl.where(rank == i, best, chosen)
        chosen_scores = tl.where(rank == i, tl.sum(tl.where(place == best, scores, 0.0), 0), chosen_scores)
        key = tl.where(place == best, float("-inf"), key)
    if GROUPS > 1:
        chosen = chosen // SIZE * size + chosen % SIZE
    if RENORMALISE:
        chosen_scores = chosen_scores / (tl.sum(chosen_scores, 0) + LEAST_SUM)
    to = token * num_chosen + rank
    tl.store(weights + to, chosen_scores * scale, mask=rank < num_chosen)
    tl.store(expert_ids + to, chosen.to(tl.int64), mask=rank < num_chosen)


@jit
def _kept_groups(
    keys,  # [GROUPS, SIZE], -inf where there is no expert
    num_groups,
    num_kept_groups,
    TOP2: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """[GROUPS] int32: 1 for groups that experts are chosen from."""
    group = tl.arange(0, GROUPS)
    score = tl.max(keys, 1)
    if TOP2:
        slot = tl.arange(0, SIZE)[None, :]
        best = tl.min(tl.where(keys == score[:, None], slot, SIZE), 1)
        score += tl.max(tl.where(slot == best[:, None], float("-inf"), keys), 1)
    is_left = (group < num_groups).to(tl.int32)
    for _ in range(num_kept_groups):
        top = tl.max(tl.where(is_left != 0, score, float("-inf")), 0)
        best_group = tl.min(tl.where((is_left != 0) & (score == top), group, GROUPS), 0)
        is_left = tl.where(group == best_group, 0, is_left)
    return ((group < num_groups) & (is_left == 0)).to(tl.int32)
