"""Cases of norms, routing and experts, for ``triton_cases``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from slipstream.experts_config import Routing
from slipstream.kernels.elementwise.rms_norm import add_rms_norm, rms_norm
from slipstream.kernels.linear.moe import expert_mlp, route_tokens
from tests.kernels.triton_check import Case, Real


def norms() -> Iterator[Case]:
    for shape in ((1, 1), (3, 80), (2, 576), (2, 4096), (1, 20000), (0, 64), (3, 5, 80)):
        name = "x".join(map(str, shape))

        def args(shape: tuple[int, ...] = shape) -> dict[str, Any]:
            return {"x": Real(3 * torch.randn(shape)), "weight": Real(torch.randn(shape[-1])), "eps": 1e-5}

        yield Case(f"rms_norm-{name}", rms_norm, args)
        if len(shape) == 2:

            def with_residual(shape: tuple[int, ...] = shape) -> dict[str, Any]:
                x, residual, weight = torch.randn(shape), 100 * torch.randn(shape), torch.randn(shape[-1])
                return {"x": Real(x), "residual": Real(residual), "weight": Real(weight), "eps": 1e-6}

            yield Case(f"add_rms_norm-{name}", add_rms_norm, with_residual)

    def joint() -> dict[str, Any]:
        q, _ = torch.randn(4, 9, 24).split([6, 3], dim=1)
        return {"x": Real(q), "weight": Real(torch.randn(24)), "eps": 1e-5}

    def wide_weight() -> dict[str, Any]:
        return {"x": Real(torch.randn(3, 40)), "weight": torch.randn(40), "eps": 1e-5}

    def tiny() -> dict[str, Any]:
        return {"x": Real(torch.randn(2, 40) * 1e-3), "weight": Real(torch.randn(40)), "eps": 1e-5}

    def columns() -> dict[str, Any]:
        return {"x": Real(torch.randn(40, 3).T), "weight": Real(torch.randn(40)), "eps": 1e-5}

    yield Case("rms_norm-heads-of-a-joint-product", rms_norm, joint)
    yield Case("rms_norm-float32-weight", rms_norm, wide_weight)
    yield Case("rms_norm-eps-counts", rms_norm, tiny)
    yield Case("rms_norm-columns", rms_norm, columns)


def route(logits: Tensor, routing: Routing) -> dict[str, Any]:
    """Logits that are no numbers route somewhere as well, see ``test_routing``."""
    bias = 0.3 * torch.randn(logits.shape[1]) if routing.has_bias else None
    return {"logits": Real(logits), "bias": bias, "routing": routing}


def routes() -> Iterator[Case]:
    for num_tokens, num_experts, num_chosen in ((0, 4, 2), (1, 1, 1), (1, 4, 1), (5, 6, 6), (3, 60, 5), (2, 128, 8)):
        for renormalise in (False, True):

            def args(
                shape: tuple[int, int] = (num_tokens, num_experts), n: int = num_chosen, renormalise: bool = renormalise
            ) -> dict[str, Any]:
                return route(2 * torch.randn(shape), Routing(n, renormalise))

            name = f"route-{num_tokens}x{num_chosen}-of-{num_experts}" + "-renormalised" * renormalise
            yield Case(name, route_tokens, args)

    def ties() -> dict[str, Any]:
        logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0], [0.0] * 5, [-1e4] * 5])
        return route(logits, Routing(4, True))

    def far_apart() -> dict[str, Any]:
        logits = torch.tensor([[3e4, -3e4, 100.0], [-torch.inf, 0.0, -torch.inf]])
        return route(logits, Routing(3))

    yield Case("route-ties", route_tokens, ties)
    yield Case("route-far-apart", route_tokens, far_apart)


def grouped_routes() -> Iterator[Case]:
    """Shapes are (tokens, experts, groups, kept groups, experts of a token)."""
    for shape in ((0, 8, 4, 2, 3), (3, 15, 5, 2, 4), (2, 9, 3, 1, 3), (4, 60, 6, 4, 7), (2, 160, 8, 3, 6)):
        num_tokens, num_experts, num_groups, num_kept, num_chosen = shape
        groups: dict[str, Any] = {"num_groups": num_groups, "num_kept_groups": num_kept, "scale": 2.5}
        kinds = {
            "softmax-max": Routing(num_chosen, **groups),
            "softmax-max-renormalised": Routing(num_chosen, True, **groups),
            "sigmoid-top2": Routing(num_chosen, False, "sigmoid", True, group_score="top2", **groups),
            "sigmoid-max": Routing(num_chosen, True, "sigmoid", True, **groups),
        }
        for kind, routing in kinds.items():
            name = f"route-{'x'.join(map(str, shape))}-{kind}"
            yield Case(name, route_tokens, lambda n=(num_tokens, num_experts), r=routing: route(torch.randn(n), r))
    largest = Routing(8, True, "sigmoid", True, 8, 4, "top2", 2.5)
    yield Case("route-8-of-256", route_tokens, lambda: route(torch.randn(3, 256), largest))
    plain = Routing(3, True, "sigmoid", True, scale=1.5)
    yield Case("route-sigmoid-without-groups", route_tokens, lambda: route(torch.randn(5, 11), plain))

    def ties(routing: Routing) -> dict[str, Any]:
        logits = torch.tensor([[0.0] * 12, [1.0, 0.0, 0.0] * 4, [-1.0, 0.0, 2.0, -1.0, 2.0, 0.0] * 2])
        bias = torch.zeros(12) if routing.has_bias else None
        return {"logits": Real(logits), "bias": bias, "routing": routing}

    for tied in (Routing(4, True, "softmax", False, 4, 2), Routing(4, True, "sigmoid", True, 4, 2, "top2")):
        yield Case(f"route-ties-{tied.scoring}", route_tokens, lambda routing=tied: ties(routing))


# What expert a token's rank goes to: [num_tokens, num_chosen] from these and the number of experts.
Assignment = Callable[[int, int, int], Tensor]


def anywhere(num_tokens: int, num_chosen: int, num_experts: int) -> Tensor:
    return torch.rand(num_tokens, num_experts).argsort(1)[:, :num_chosen].contiguous()


def the_same(num_tokens: int, num_chosen: int, num_experts: int) -> Tensor:
    return torch.arange(num_experts)[-num_chosen:].repeat(num_tokens, 1)


def not_the_first(num_tokens: int, num_chosen: int, num_experts: int) -> Tensor:
    return 1 + anywhere(num_tokens, num_chosen, num_experts - 1)


def layer(
    routing: Assignment, num_tokens: int, num_chosen: int, num_experts: int, hidden: int, size: int
) -> dict[str, Any]:
    return {
        "x": Real(torch.randn(num_tokens, hidden)),
        "weights": torch.rand(num_tokens, num_chosen),
        "expert_ids": routing(num_tokens, num_chosen, num_experts),
        "gate_up": Real(torch.randn(num_experts, 2 * size, hidden) * hidden**-0.5),
        "down": Real(torch.randn(num_experts, hidden, size) * size**-0.5),
    }


def experts() -> Iterator[Case]:
    for routing, *shape in (
        (anywhere, 0, 2, 3, 32, 32),
        (anywhere, 1, 1, 1, 1, 1),
        (anywhere, 1, 2, 5, 96, 40),
        (anywhere, 7, 3, 3, 33, 65),
        (not_the_first, 19, 2, 4, 96, 40),
        (the_same, 20, 1, 6, 40, 96),  # more than a block on one expert, among few
        (the_same, 70, 1, 3, 40, 96),  # and among many
        (anywhere, 60, 2, 3, 96, 40),
    ):
        name = f"experts-{routing.__name__}-{'x'.join(map(str, shape))}"
        yield Case(name, expert_mlp, lambda routing=routing, shape=shape: layer(routing, *shape))
