"""Feed-forward layers with experts: their sizes, and how the experts of a token are chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Routing:
    """How a router's logits become the experts of a token and their weights. Equal ones are taken in their order."""

    num_chosen: int  # experts of a token
    renormalise: bool = False  # whether the weights of a token's experts are divided by their sum
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    has_bias: bool = False  # added to the scores that experts are chosen by, never to weights
    # Experts are chosen within so many groups, all of one size; the groups are chosen by the largest score of each, or
    # by the sum of the two largest.
    num_groups: int = 1
    num_kept_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    scale: float = 1.0  # of the weights
    wide_logits: bool = False  # whether logits are computed in float32 at least, instead of the model's type

    @property
    def has_groups(self) -> bool:
        return self.num_kept_groups < self.num_groups


@dataclass(frozen=True)
class ExpertsConfig:
    """Feed-forward layers with experts, a few of which are chosen for each token."""

    num_experts: int
    intermediate_size: int
    routing: Routing
    layer_ids: tuple[int, ...]  # the other layers have one dense feed-forward
    shared_size: int = 0  # of an expert that every token uses beside the chosen ones; 0: none
    shared_gate: bool = False  # whether that expert's output is multiplied by the sigmoid of a gate

    @property
    def num_experts_per_token(self) -> int:
        return self.routing.num_chosen
