"""How experts are chosen, against the routers of ``transformers`` and by algebra."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from slipstream.experts_config import Routing
from slipstream.kernels import triton_jit
from slipstream.kernels.linear.moe import route_tokens
from tests.kernels.triton_check import poisoned_allocations, quietly_interpreted

NUM_TOKENS, HIDDEN = 50, 12
# (experts, groups, kept groups, experts of a token)
SHAPES = [(8, 1, 1, 3), (15, 5, 2, 4), (24, 4, 3, 6), (256, 8, 4, 8)]


def spread(weights: Tensor, expert_ids: Tensor, num_experts: int) -> Tensor:
    """[num_tokens, num_experts]: each expert's weight, whatever its rank."""
    return torch.zeros(weights.shape[0], num_experts, dtype=weights.dtype).scatter(1, expert_ids, weights)


def config_of(kind: type, shape: tuple[int, ...], **values: Any) -> Any:
    num_experts, num_groups, num_kept, num_chosen = shape
    given = {
        "hidden_size": HIDDEN,
        "num_attention_heads": 2,
        "n_routed_experts": num_experts,
        "num_experts_per_tok": num_chosen,
    }
    return kind(**given, n_group=num_groups, topk_group=num_kept, **values)


def against(router: torch.nn.Module, routing: Routing) -> Tensor:
    """Compare both for random tokens; the weights by expert."""
    weight = getattr(router, "weight")  # noqa: B009
    torch.nn.init.normal_(weight)
    x = torch.randn(NUM_TOKENS, HIDDEN)
    with torch.no_grad():
        logits, weights, expert_ids = router(x)
    bias = getattr(router, "e_score_correction_bias", None)
    ours = spread(*route_tokens(logits, bias, routing), weight.shape[0])
    torch.testing.assert_close(ours, spread(weights, expert_ids, weight.shape[0]), rtol=1e-6, atol=1e-7)
    return ours


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_sigmoids_with_a_bias(shape: tuple[int, ...], renormalise: bool) -> None:
    config = config_of(DeepseekV3Config, shape, norm_topk_prob=renormalise, routed_scaling_factor=2.5)
    router = DeepseekV3TopkRouter(config)
    torch.nn.init.normal_(router.e_score_correction_bias, std=0.2)
    _, num_groups, num_kept, num_chosen = shape
    routing = Routing(num_chosen, renormalise, "sigmoid", True, num_groups, num_kept, "top2", 2.5)
    weights = against(router, routing)
    if renormalise:
        torch.testing.assert_close(weights.sum(-1), torch.full((NUM_TOKENS,), 2.5))


@pytest.mark.parametrize("shape", SHAPES)
def test_softmax_in_groups(shape: tuple[int, ...]) -> None:
    method = "greedy" if shape[1] == 1 else "group_limited_greedy"
    config = config_of(DeepseekV2Config, shape, topk_method=method, routed_scaling_factor=16.0)
    _, num_groups, num_kept, num_chosen = shape
    against(
        DeepseekV2TopkRouter(config), Routing(num_chosen, num_groups=num_groups, num_kept_groups=num_kept, scale=16)
    )


def test_softmax_in_groups_whose_weights_sum_to_the_scale() -> None:
    logits = torch.randn(9, 12)
    routing = Routing(3, False, num_groups=4, num_kept_groups=2, scale=2.0)
    weights, expert_ids = route_tokens(logits, None, routing)
    divided, same_ids = route_tokens(logits, None, replace(routing, renormalise=True))
    assert torch.equal(expert_ids, same_ids)
    torch.testing.assert_close(divided, 2 * weights / weights.sum(-1, keepdim=True))


def test_a_bias_changes_who_is_chosen_and_no_weight() -> None:
    logits = torch.randn(20, 10, dtype=torch.float64)
    scores, bias = torch.sigmoid(logits), torch.zeros(10)
    bias[7] = 2.0
    routing = Routing(3, scoring="sigmoid", has_bias=True)
    weights, expert_ids = route_tokens(logits, bias, routing)
    assert bool((expert_ids[:, 0] == 7).all())
    assert torch.equal(weights, scores.gather(1, expert_ids))
    bias[7] = -2.0
    weights, expert_ids = route_tokens(logits, bias, routing)
    assert not bool((expert_ids == 7).any())
    assert torch.equal(weights, scores.gather(1, expert_ids))


def test_equal_groups_and_experts_are_taken_in_order() -> None:
    logits = torch.zeros(2, 12)
    logits[1, 6:] = 1.0
    for kind in (Routing(4, scoring="sigmoid", group_score="top2"), Routing(4)):
        _, expert_ids = route_tokens(logits, None, replace(kind, num_groups=4, num_kept_groups=2))
        assert expert_ids.tolist() == [[0, 1, 2, 3], [6, 7, 8, 9]]


def test_the_group_with_the_two_best_is_not_that_with_the_best() -> None:
    logits = torch.tensor([[3.0, -9.0, 2.0, 1.9]])
    for score, expected in (("max", [0]), ("top2", [2])):
        assert score in ("max", "top2")
        _, expert_ids = route_tokens(
            logits, None, Routing(1, scoring="sigmoid", num_groups=2, num_kept_groups=1, group_score=score)
        )
        assert expert_ids.tolist() == [expected]


@pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # numpy's, where a GPU is silent
@pytest.mark.parametrize("num_experts", [12, 32])
@pytest.mark.parametrize(
    "routing",
    [
        Routing(3, True, "sigmoid", True, 4, 2, "top2", 2.5),
        Routing(3, False, "sigmoid", True),
        Routing(3, True, num_groups=4, num_kept_groups=1),
    ],
    ids=str,
)
def test_what_is_not_a_number_finds_experts(routing: Routing, num_experts: int) -> None:
    """By the definition and by the kernel, and the same ones."""
    logits = torch.randn(7, num_experts)
    logits[0], logits[1, 5], logits[2, 4], logits[3] = torch.nan, torch.nan, torch.inf, -torch.inf
    logits[4, 1], logits[4, 9], logits[5, 6:8] = torch.nan, torch.nan, torch.nan
    bias = 0.1 * torch.randn(num_experts) if routing.has_bias else None
    weights, expert_ids = route_tokens(logits, bias, routing)
    with quietly_interpreted(), poisoned_allocations():
        found_weights, found_ids = route_tokens(logits, bias, routing)
    for ids in (expert_ids, found_ids):
        assert bool(((ids >= 0) & (ids < num_experts)).all())
        assert all(len(set(row)) == 3 for row in ids.tolist())
    assert torch.equal(found_ids, expert_ids)
    torch.testing.assert_close(found_weights, weights, equal_nan=True)


@pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")
@pytest.mark.parametrize("routing", [Routing(5, num_groups=4, num_kept_groups=2), Routing(1, num_groups=8)], ids=str)
def test_kernel_cannot_choose_more_than_the_groups_have(routing: Routing) -> None:
    with quietly_interpreted(), pytest.raises(ValueError, match="experts cannot be chosen in"):
        route_tokens.body(torch.randn(2, 8), None, routing)
