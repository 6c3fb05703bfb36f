"""Routing and experts against a plain loop over tokens in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.experts_config import Routing
from slipstream.kernels import triton_jit
from slipstream.kernels.linear.moe import expert_mlp, route_tokens
from tests.kernels.triton_check import poisoned_allocations, quietly_interpreted

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def numpy_route(logits: np.ndarray, num_chosen: int, renormalise: bool) -> tuple[np.ndarray, np.ndarray]:
    weights, ids = [], []
    for row in logits:
        probs = np.exp(row - row.max())
        probs /= probs.sum()
        best = sorted(range(len(row)), key=lambda i: (-probs[i], i))[:num_chosen]
        total = sum(probs[i] for i in best) if renormalise else 1.0
        weights.append([probs[i] / total for i in best])
        ids.append(best)
    return np.array(weights), np.array(ids)


def numpy_experts(
    x: np.ndarray, weights: np.ndarray, ids: np.ndarray, gate_up: np.ndarray, down: np.ndarray
) -> np.ndarray:
    out = np.zeros_like(x)
    half = gate_up.shape[1] // 2
    for token in range(len(x)):
        for weight, expert in zip(weights[token], ids[token], strict=True):
            gate, up = gate_up[expert, :half] @ x[token], gate_up[expert, half:] @ x[token]
            out[token] += weight * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
    return out


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(("num_tokens", "num_experts", "num_chosen"), [(1, 1, 1), (1, 4, 1), (7, 8, 2), (5, 6, 6)])
def test_routing(num_tokens: int, num_experts: int, num_chosen: int, renormalise: bool) -> None:
    logits = torch.randn(num_tokens, num_experts, dtype=torch.float64) * 2
    weights, ids = route_tokens(logits, None, Routing(num_chosen, renormalise))
    expected_weights, expected_ids = numpy_route(logits.numpy(), num_chosen, renormalise)
    assert np.array_equal(ids.numpy(), expected_ids)
    np.testing.assert_allclose(weights.numpy(), expected_weights, rtol=1e-12)
    assert bool((weights.sum(-1) < 1 + 1e-12).all())


def test_equal_experts_are_taken_in_order() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0], [0.0] * 5])
    _, ids = route_tokens(logits, None, Routing(4, True))
    assert ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]


def test_routing_weights_are_not_rounded_to_16_bits() -> None:
    logits = torch.randn(3, 8).to(torch.bfloat16)
    weights, _ = route_tokens(logits, None, Routing(2, True))
    assert weights.dtype == torch.float32
    np.testing.assert_allclose(weights.numpy(), numpy_route(logits.double().numpy(), 2, True)[0], rtol=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_chosen", "hidden", "size"),
    [(0, 3, 2, 8, 4), (1, 1, 1, 8, 4), (1, 5, 2, 16, 3), (17, 4, 2, 8, 12), (9, 3, 3, 5, 7)],
)
def test_experts(
    dtype: torch.dtype, num_tokens: int, num_experts: int, num_chosen: int, hidden: int, size: int
) -> None:
    x = torch.randn(num_tokens, hidden).to(dtype)
    gate_up = (torch.randn(num_experts, 2 * size, hidden) * 0.3).to(dtype)
    down = (torch.randn(num_experts, hidden, size) * 0.3).to(dtype)
    weights, ids = route_tokens(torch.randn(num_tokens, num_experts).to(dtype), None, Routing(num_chosen, True))
    out = expert_mlp(x, weights, ids, gate_up, down)
    arrays = (t.double().numpy() for t in (x, weights))
    expected = numpy_experts(*arrays, ids.numpy(), gate_up.double().numpy(), down.double().numpy())
    np.testing.assert_allclose(out.double().numpy(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def random_layer(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(num_tokens, 24, dtype=torch.float64)
    weights, ids = route_tokens(torch.randn(num_tokens, 6, dtype=torch.float64), None, Routing(3, False))
    gate_up, down = torch.randn(6, 20, 24, dtype=torch.float64), torch.randn(6, 24, 10, dtype=torch.float64)
    return x, weights, ids, gate_up, down


def test_a_token_does_not_depend_on_its_batch() -> None:
    x, weights, ids, gate_up, down = random_layer(40)
    together = expert_mlp(x, weights, ids, gate_up, down)
    order = torch.randperm(40)
    shuffled = expert_mlp(x[order], weights[order], ids[order], gate_up, down)
    torch.testing.assert_close(shuffled, together[order], rtol=1e-13, atol=1e-13)
    for token in (0, 13, 39):
        row = slice(token, token + 1)
        alone = expert_mlp(x[row], weights[row], ids[row], gate_up, down)
        torch.testing.assert_close(alone, together[row], rtol=1e-13, atol=1e-13)


def test_tokens_without_meaning_stay_among_themselves() -> None:
    """Padding carries whatever was in memory; it must route somewhere and touch no one else."""
    x, _, _, gate_up, down = random_layer(8)
    logits = torch.randn(8, 6, dtype=torch.float64)
    clean = expert_mlp(x, *route_tokens(logits, None, Routing(3, True)), gate_up, down)
    x[5], logits[5], x[2], logits[2] = float("nan"), float("nan"), float("inf"), float("inf")
    weights, ids = route_tokens(logits, None, Routing(3, True))
    assert bool(((ids >= 0) & (ids < 6)).all())
    dirty = expert_mlp(x, weights, ids, gate_up, down)
    kept = [0, 1, 3, 4, 6, 7]
    torch.testing.assert_close(dirty[kept], clean[kept], rtol=1e-13, atol=1e-13)


@pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # numpy's, where a GPU is silent
@pytest.mark.parametrize("num_experts", [6, 8])
@pytest.mark.parametrize("renormalise", [False, True])
def test_kernel_routes_what_is_not_a_number_as_the_definition_does(num_experts: int, renormalise: bool) -> None:
    logits = torch.randn(6, num_experts)
    logits[0], logits[1, 2], logits[2, 4], logits[3] = torch.nan, torch.nan, torch.inf, -torch.inf
    weights, ids = route_tokens(logits, None, Routing(3, renormalise))
    with quietly_interpreted(), poisoned_allocations():
        found_weights, found_ids = route_tokens(logits, None, Routing(3, renormalise))
    assert bool(((found_ids >= 0) & (found_ids < num_experts)).all())
    assert torch.equal(found_ids, ids)
    torch.testing.assert_close(found_weights, weights, equal_nan=True)


@pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")
def test_kernel_cannot_choose_more_than_there_are() -> None:
    with quietly_interpreted(), pytest.raises(ValueError, match="5 experts cannot be chosen of 4"):
        route_tokens.body(torch.randn(2, 4), None, Routing(5, True))
