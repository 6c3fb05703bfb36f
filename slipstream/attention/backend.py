"""The protocol of attention backends: from queries to keys and values in pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.kernels.attention.rope_cache import NewTokens


@dataclass(frozen=True, slots=True)
class Caps:
    """The abilities of a backend, and what it needs from the host."""

    dtypes: tuple[str, ...]
    # What the host must know of sequence lengths: nothing, an upper bound, or the exact values.
    host_lengths: Literal["none", "bound", "exact"]
    # For which batches `run` may be captured in a graph.
    graph_support: Literal["never", "decode", "always"]
    # Whether `run_new` is supported.
    stores_keys: bool = False
    # Whether `in_place` is supported.
    stacks_layers: bool = False


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The fixed properties of one attention layer of a model."""

    idx: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0  # positions that a token attends to, itself included; 0: all before it


class AttentionBackend(Protocol):
    @property
    def caps(self) -> Caps: ...

    def step_buffers(self) -> Sequence[Tensor]:
        """Memory of the backend that `build` fills in every step. Debug runs poison it before."""
        ...

    def build(self, common: CommonAttentionMetadata) -> Any:
        """Once per step: the metadata for `run`. Must not synchronise with the device."""
        ...

    def starting_at(self, metadata: Any, seq_starts: Tensor) -> Any:
        """The same for a drafter that shares the metadata: it has keys of each request from these slots on only."""
        ...

    def run(self, layer: AttentionLayer, q: Tensor, kv_cache: Tensor, metadata: Any) -> Tensor:
        """Once per layer: attend from rotated queries to the layer's cache, which already holds this step's keys."""
        ...


class StoringBackend(AttentionBackend, Protocol):
    """A backend that also stores keys (``Caps.stores_keys``)."""

    def run_new(self, layer: AttentionLayer, new: NewTokens, kv_cache: Tensor, metadata: Any) -> Tensor | None:
        """Once per layer: norm, rotate, store and attend in one launch; None if that is not possible for this batch."""
        ...


class StackingBackend(AttentionBackend, Protocol):
    """A backend whose steps may be computed by one operation over all layers (``Caps.stacks_layers``)."""

    def in_place(self, metadata: Any) -> CommonAttentionMetadata | None:
        """The batch, if pages are read in place; None where this step gathers them."""
        ...
