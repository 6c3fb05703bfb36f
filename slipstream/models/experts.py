"""A feed-forward layer of experts: a router, and the experts' weights stacked.

Checkpoints store the experts one by one, or each kind of weight of a layer in one tensor; both are read.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from slipstream.config import ExpertsConfig, ModelConfig
from slipstream.errors import ModelError
from slipstream.kernels.moe import expert_mlp, route_tokens
from slipstream.models.layers import FeedForward, Linear


class ExpertWeights(nn.Module):
    def __init__(self, experts: ExpertsConfig, hidden_size: int) -> None:
        super().__init__()
        num, size = experts.num_experts, experts.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(num, 2 * size, hidden_size), requires_grad=False)
        self.down_proj = nn.Parameter(torch.empty(num, hidden_size, size), requires_grad=False)

    def slots(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """The names of the experts' weights, one expert after another, beside the memory they go to."""
        for idx, (gate_up, down) in enumerate(zip(self.gate_up_proj, self.down_proj, strict=True)):
            gate, up = gate_up.chunk(2)
            yield f"{prefix}{idx}.gate_proj.weight", gate
            yield f"{prefix}{idx}.up_proj.weight", up
            yield f"{prefix}{idx}.down_proj.weight", down


class Experts(nn.Module):
    """Stands where a dense layer has its ``FeedForward``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.experts is not None
        self.config = config.experts
        self.gate = Linear(config.hidden_size, {"gate": self.config.num_experts})
        self.experts = ExpertWeights(self.config, config.hidden_size)
        self.shared_expert: FeedForward | None = None
        self.shared_expert_gate: Linear | None = None
        if self.config.shared_size:
            self.shared_expert = FeedForward(config, self.config.shared_size)
            self.shared_expert_gate = Linear(config.hidden_size, {"shared_expert_gate": 1})

    def forward(self, x: Tensor) -> Tensor:
        weights, expert_ids = route_tokens(self.gate(x), self.config.num_experts_per_token, self.config.renormalise)
        out = expert_mlp(x, weights, expert_ids, self.experts.gate_up_proj, self.experts.down_proj)
        if self.shared_expert is None or self.shared_expert_gate is None:
            return out
        return torch.addcmul(out, torch.sigmoid(self.shared_expert_gate(x)), self.shared_expert(x))


def split_experts(name: str, tensor: Tensor, experts: ExpertsConfig) -> Iterator[tuple[str, Tensor]]:
    """A tensor that holds all experts of a layer, expert by expert; any other passes through."""
    prefix, _, kind = name.rpartition(".")
    if kind not in ("gate_up_proj", "down_proj"):
        yield name, tensor
        return
    rows = 2 * experts.intermediate_size if kind == "gate_up_proj" else None
    if tensor.ndim != 3 or tensor.shape[0] != experts.num_experts or (rows and tensor.shape[1] != rows):
        raise ModelError(
            f"tensor '{name}' has shape {list(tensor.shape)}, the config says "
            f"{experts.num_experts} experts of size {experts.intermediate_size}"
        )
    for idx, matrix in enumerate(tensor):
        if kind == "down_proj":
            yield f"{prefix}.{idx}.down_proj.weight", matrix
        else:
            gate, up = matrix.chunk(2)
            yield f"{prefix}.{idx}.gate_proj.weight", gate
            yield f"{prefix}.{idx}.up_proj.weight", up
