"""A feed-forward layer of experts: a router, and the experts' weights stacked.

Checkpoints store the experts one by one, or each kind of weight of a layer in one tensor; both are read.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from slipstream.config import ModelConfig
from slipstream.errors import ModelError
from slipstream.experts_config import ExpertsConfig
from slipstream.kernels.linear.moe import route_tokens
from slipstream.models.layers import FeedForward, Layer, Linear, Reduction
from slipstream.weights.matrix import ExpertMatrices, ExpertShape, Slot, StoredExperts, WeightScheme


class ExpertWeights(Layer):
    """All experts of a layer; ``experts`` in checkpoints."""

    matrices: ExpertMatrices

    def __init__(self, experts: ExpertsConfig, hidden_size: int) -> None:
        super().__init__()
        self.shape = ExpertShape(experts.num_experts, hidden_size, experts.intermediate_size)
        self.stored: StoredExperts | None = None  # None once the weights are finished

    def forward(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        return self.matrices.run(x, weights, expert_ids)

    def open_weights(self, scheme: WeightScheme, name: str) -> None:
        self.stored = scheme.format_of([name]).open_experts(self.shape)
        if isinstance(self.stored, ExpertMatrices):
            self.matrices = self.stored  # can be multiplied with before it is finished

    def own_slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        """One expert after another."""
        assert self.stored is not None, "the weights are not open"
        return self.stored.slots(f"{name}.")

    def finish_weights(self, device: torch.device) -> None:
        if self.stored is not None:
            self.matrices, self.stored = self.stored.finish(device), None


class Experts(Layer):
    """Replaces the ``FeedForward`` of a dense layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.experts is not None
        self.config = config.experts
        self.gate = Linear(config.hidden_size, {"gate": self.config.num_experts})
        self.experts = ExpertWeights(self.config, config.hidden_size)
        self.reduction: Reduction | None = None  # see ``Linear``
        # Biases differ little, and experts are chosen by them: in 16 bits many would be equal.
        wide = torch.promote_types(torch.get_default_dtype(), torch.float32)
        bias = torch.empty(self.config.num_experts, dtype=wide) if self.config.routing.has_bias else None
        self.correction_bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        # What every token uses, by its name in checkpoints: one expert with a gate, or several joined without.
        self.shared_expert: FeedForward | None = None
        self.shared_expert_gate: Linear | None = None
        self.shared_experts: FeedForward | None = None
        if self.config.shared_size and self.config.shared_gate:
            self.shared_expert = FeedForward(config, self.config.shared_size)
            self.shared_expert_gate = Linear(config.hidden_size, {"shared_expert_gate": 1})
        elif self.config.shared_size:
            self.shared_experts = FeedForward(config, self.config.shared_size)

    def forward(self, x: Tensor) -> Tensor:
        routing = self.config.routing
        logits = self.gate.matrix.project_wide(x) if routing.wide_logits else self.gate(x)
        weights, expert_ids = route_tokens(logits, self.correction_bias, routing)
        out: Tensor = self.experts(x, weights, expert_ids)
        if self.reduction is not None:
            out = self.reduction(out)
        if self.shared_experts is not None:
            return torch.add(out, self.shared_experts(x))
        if self.shared_expert is None or self.shared_expert_gate is None:
            return out
        return torch.addcmul(out, torch.sigmoid(self.shared_expert_gate(x)), self.shared_expert(x))

    def own_slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        if self.correction_bias is not None:
            yield f"{name}.gate.e_score_correction_bias", self.correction_bias


def split_experts(name: str, tensor: Tensor, experts: ExpertsConfig) -> Iterator[tuple[str, Tensor]]:
    """Split a tensor that holds all experts of a layer; any other is returned unchanged."""
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
