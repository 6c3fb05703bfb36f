"""A step's caches during the model's forward pass. Passed explicitly: no layer reads a global."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.kernels.elementwise.tap import tap

# The tap after the final norm; other taps are numbers of layers.
NORMED = -1


class CacheLayer(Protocol):
    """The fixed properties of one layer. Each kind of cache adds what its backend needs."""

    @property
    def idx(self) -> int: ...  # among all layers of the network


class StepTokens(NamedTuple):
    """The tokens of a pass, and the batch they belong to."""

    positions: Tensor  # [padded_tokens] int64
    slot_mapping: Tensor  # [padded_tokens] int64; -1 writes nothing
    common: CommonAttentionMetadata | None  # None for tokens whose keys are only stored


class GroupStep(Protocol):
    """One pass over the layers of a group. Each kind adds methods that its layers call."""

    @property
    def shared(self) -> Any:
        """Metadata that another network's pass over the same batch can reuse; None if there is none."""
        ...

    @property
    def is_recorded(self) -> bool:
        """Whether a piecewise graph captures the layers' work, instead of launching it in every step."""
        ...

    def run(self, layer: Any, inputs: Any) -> Tensor:
        """Once per layer: update the cache with the tokens, and return the layer's result."""
        ...

    def make_output(self, inputs: Any) -> Tensor:
        """Memory for that result, between the pieces of a piecewise graph."""
        ...


@dataclass(slots=True)
class AttentionContext:
    group_steps: Sequence[GroupStep]
    group_of_layer: Sequence[int]  # of each layer of the network: an index into ``group_steps``
    positions: Tensor  # [padded_tokens] int64
    slot_mapping: Tensor  # [padded_tokens] int64
    # Buffers for the residual stream after a number of layers, or after the final norm: [padded_tokens, hidden].
    taps: Mapping[int, Tensor] = field(default_factory=dict)
    inputs: Any = None  # what the model's own state has prepared for the pass

    def at(self, layer: CacheLayer) -> Any:
        """The step of the layer's group."""
        return self.group_steps[self.group_of_layer[layer.idx]]

    def run(self, layer: CacheLayer, inputs: Any) -> Tensor:
        out: Tensor = self.group_steps[self.group_of_layer[layer.idx]].run(layer, inputs)
        return out

    def tap(self, num_layers: int, hidden: Tensor, residual: Tensor | None = None) -> None:
        """Called by the model: hidden + residual is the residual stream after this many layers."""
        if (out := self.taps.get(num_layers)) is not None:
            tap(hidden, residual, out)

    @property
    def shared(self) -> tuple[Any, ...]:
        """The shared metadata of each group, for ``CacheGroups.begin`` of another network."""
        return tuple(step.shared for step in self.group_steps)
