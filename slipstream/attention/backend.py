"""The protocol of backends that attend: from queries to keys and values in pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.kernels.rope_cache import NewTokens


@dataclass(frozen=True, slots=True)
class Caps:
    """What a backend can do and what it needs from the host."""

    dtypes: tuple[str, ...]
    # How much the host must know of sequence lengths: nothing, an upper bound, or the exact values.
    host_lengths: Literal["none", "bound", "exact"]
    # Whether `run` may be recorded in a graph, and for which batches.
    graph_support: Literal["never", "decode", "always"]
    # Whether `run_new` may be asked.
    stores_keys: bool = False
    # Whether `in_place` may be asked.
    stacks_layers: bool = False


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """What is fixed about one attention layer of a model."""

    idx: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0  # how many positions a token sees, itself included; 0 means all before it


class AttentionBackend(Protocol):
    @property
    def caps(self) -> Caps: ...

    def step_buffers(self) -> Sequence[Tensor]:
        """Memory of the backend's own that `build` fills anew in every step. Debug runs poison it before."""
        ...

    def build(self, common: CommonAttentionMetadata) -> Any:
        """Once a step: what `run` needs. Must not wait for the device."""
        ...

    def starting_at(self, metadata: Any, seq_starts: Tensor) -> Any:
        """The same for a drafter that shares it: of each request it has keys from these slots on only."""
        ...

    def run(self, layer: AttentionLayer, q: Tensor, kv_cache: Tensor, metadata: Any) -> Tensor:
        """Once a layer: attend from rotated queries to the layer's cache, which holds this step's keys already."""
        ...


class StoringBackend(AttentionBackend, Protocol):
    """A backend that can do more than attend (``Caps.stores_keys``)."""

    def run_new(self, layer: AttentionLayer, new: NewTokens, kv_cache: Tensor, metadata: Any) -> Tensor | None:
        """Once a layer: norm, rotate, store and attend in one go, or None where it must be done in steps."""
        ...


class StackingBackend(AttentionBackend, Protocol):
    """A backend whose steps may be computed by one operation over all layers (``Caps.stacks_layers``)."""

    def in_place(self, metadata: Any) -> CommonAttentionMetadata | None:
        """The batch, where pages are read where they are; None where this step gathers them."""
        ...
