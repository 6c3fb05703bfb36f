"""A step's caches as the model's forward pass sees them. Handed over explicitly: no layer reads a global."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.kernels.tap import tap

# The tap after the final norm; others are numbers of layers.
NORMED = -1


class CacheLayer(Protocol):
    """What is fixed about one layer. Each kind of cache adds what its backend needs to know."""

    @property
    def idx(self) -> int: ...  # among all layers of the network


class StepTokens(NamedTuple):
    """The tokens of a pass, and the batch they belong to."""

    positions: Tensor  # [padded_tokens] int64
    slot_mapping: Tensor  # [padded_tokens] int64; -1 writes nothing
    common: CommonAttentionMetadata | None  # None for tokens whose keys are stored and that attend to nothing


class GroupStep(Protocol):
    """One pass over the layers of a group. Each kind adds calls of its own, which its layers know."""

    @property
    def shared(self) -> Any:
        """What a pass of another network over the same batch can be begun with; None if there is nothing."""
        ...

    @property
    def is_recorded(self) -> bool:
        """Whether a forward pass in pieces records the layers' work, instead of launching it anew in every step."""
        ...

    def run(self, layer: Any, inputs: Any) -> Tensor:
        """Once a layer: keep what is to be kept of the tokens, and give the layer's result."""
        ...

    def make_output(self, inputs: Any) -> Tensor:
        """Memory for that result, where pieces of a recorded pass meet."""
        ...


@dataclass(slots=True)
class AttentionContext:
    group_steps: Sequence[GroupStep]
    group_of_layer: Sequence[int]  # of each layer of the network, as a place in ``group_steps``
    positions: Tensor  # [padded_tokens] int64
    slot_mapping: Tensor  # [padded_tokens] int64
    # Where a drafter reads the residual stream after so many layers, or after the final norm: [padded_tokens, hidden].
    taps: Mapping[int, Tensor] = field(default_factory=dict)
    inputs: Any = None  # what the model's own state has prepared for the pass

    def at(self, layer: CacheLayer) -> Any:
        """The step of the layer's group."""
        return self.group_steps[self.group_of_layer[layer.idx]]

    def run(self, layer: CacheLayer, inputs: Any) -> Tensor:
        out: Tensor = self.group_steps[self.group_of_layer[layer.idx]].run(layer, inputs)
        return out

    def tap(self, num_layers: int, hidden: Tensor, residual: Tensor | None = None) -> None:
        """The model has come so far: hidden + residual is the stream after so many layers."""
        if (out := self.taps.get(num_layers)) is not None:
            tap(hidden, residual, out)

    @property
    def shared(self) -> tuple[Any, ...]:
        """Of each group, for ``CacheGroups.begin`` of another network."""
        return tuple(step.shared for step in self.group_steps)
