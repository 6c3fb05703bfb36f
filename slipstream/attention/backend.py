"""The protocol of attention backends, and the context through which a model reaches one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from slipstream.attention.gdn import GDNLayer, Recurrence
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.kernels.rms_norm import rms_norm
from slipstream.kernels.rope_cache import rope_and_cache, rotation, rotation_and_slots
from slipstream.kernels.tap import tap


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


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """What is fixed about one attention layer of a model."""

    idx: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0  # how many positions a token sees, itself included; 0 means all before it


class HeadNorms(NamedTuple):
    """Norms over each head of queries and keys, before they are rotated."""

    query: Tensor  # [head_dim]
    key: Tensor  # [head_dim]
    eps: float


class NewTokens(NamedTuple):
    """A step's tokens in one layer, on their way into the cache. Heads are their own axis: [tokens, heads, size]."""

    q: Tensor
    k: Tensor
    v: Tensor
    cos: Tensor  # [tokens, 1, rotary_dim]
    sin: Tensor  # [tokens, 1, rotary_dim]
    page_ids: Tensor  # [tokens] int64
    offsets: Tensor  # [tokens] int64
    norms: HeadNorms | None


# The tap behind the final norm; others are numbers of layers.
NORMED = -1


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


@dataclass(slots=True)
class AttentionContext:
    """A step's attention, handed to the model's forward pass explicitly: no layer reads a global."""

    backend: AttentionBackend
    metadata: Any
    kv_caches: list[Tensor]  # one an attention layer: [num_pages + 1, 2, num_kv_heads, page_size, head_dim]
    positions: Tensor  # [padded_tokens] int64
    slot_mapping: Tensor  # [padded_tokens] int64
    # Where a drafter wants the residual stream after so many layers, or behind the final norm: [padded_tokens, hidden].
    taps: Mapping[int, Tensor] = field(default_factory=dict)
    recurrence: Recurrence | None = None  # of layers that keep states, where the model has any
    # Made by the first layer that needs them, shared by the rest.
    _slots: tuple[Tensor, Tensor] | None = None
    _rotations: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def attend(
        self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, norms: HeadNorms | None = None
    ) -> Tensor:
        """Norm, rotate, store keys and values, attend. Heads are their own axis: [num_tokens, heads, head_dim]."""
        kv_cache, turn = self.kv_caches[layer.idx], self.rotation(cos_sin, q.dtype)
        if self.backend.caps.stores_keys:
            new = NewTokens(q, k, v, *turn, *self.slots, norms)
            out = cast(StoringBackend, self.backend).run_new(layer, new, kv_cache, self.metadata)
            if out is not None:
                return out
        if norms is not None:
            q, k = rms_norm(q, norms.query, norms.eps), rms_norm(k, norms.key, norms.eps)
        q = rope_and_cache(q, k, v, *turn, kv_cache, *self.slots)
        return self.backend.run(layer, q, kv_cache, self.metadata)

    def store(self, layer: AttentionLayer, k: Tensor, v: Tensor, cos_sin: Tensor, norms: HeadNorms | None) -> None:
        """The same without attending: norm and rotate keys, store them and their values."""
        k = k if norms is None else rms_norm(k, norms.key, norms.eps)
        turn = self.rotation(cos_sin, k.dtype)
        rope_and_cache(k[:, :0], k, v, *turn, self.kv_caches[layer.idx], *self.slots)

    def prepare_states(self) -> None:
        """What layers with states share, before the product in front of the first one's.

        Kernels behind that product start early and count on what is written before it, not on what comes between.
        """
        if self.recurrence is not None:
            self.recurrence.prepare()

    def recur(self, layer: GDNLayer, qkv: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Convolve, and go on from the requests' states: [num_tokens, v_heads, v_dim]."""
        assert self.recurrence is not None, "whoever made this step does not know that the model keeps states"
        return self.recurrence.run(layer, qkv, a, b)

    def tap(self, num_layers: int, hidden: Tensor, residual: Tensor | None = None) -> None:
        """The model has come so far: hidden + residual is the stream after so many layers."""
        if (out := self.taps.get(num_layers)) is not None:
            tap(hidden, residual, out)

    @property
    def slots(self) -> tuple[Tensor, Tensor]:
        """Page and offset of every token; made with the first rotation."""
        assert self._slots is not None
        return self._slots

    def rotation(self, cos_sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines at the tokens' positions."""
        turn = self._rotations.get(id(cos_sin))
        if turn is not None:
            return turn
        if self._slots is None:
            num_pages, _, _, page_size, _ = self.kv_caches[0].shape
            found = rotation_and_slots(cos_sin, self.positions, dtype, self.slot_mapping, num_pages, page_size)
            turn, self._slots = found[:2], found[2:]
        else:
            turn = rotation(cos_sin, self.positions, dtype)
        self._rotations[id(cos_sin)] = turn
        return turn
