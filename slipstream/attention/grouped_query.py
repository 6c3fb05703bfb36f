"""Grouped-query attention: norm, rotation and cache write around an attention backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from slipstream.attention.backend import (
    AttentionBackend,
    AttentionLayer,
    Caps,
    StackingBackend,
    StoringBackend,
)
from slipstream.attention.context import StepTokens
from slipstream.attention.groups import CacheGroup, CacheGroups
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.attention.token_places import PassPlaces
from slipstream.cache_spec import GroupedQuerySpec
from slipstream.kernels.attention.rope_cache import HeadNorms, NewTokens, rope_and_cache
from slipstream.kernels.elementwise.rms_norm import rms_norm


class NewHeads(NamedTuple):
    """The output of a layer's projection for the tokens. Heads are a separate axis: [num_tokens, heads, head_dim]."""

    q: Tensor
    k: Tensor
    v: Tensor
    cos_sin: Tensor  # [max_position, 2, rotary_dim / 2]
    norms: HeadNorms | None = None


class GroupedQueryCaches:
    """The keys and values of a group of layers, and the attention backend that reads them."""

    def __init__(self, attention: AttentionBackend, kv_caches: Mapping[int, Tensor]) -> None:
        self.attention = attention
        self.kv_caches = kv_caches  # by layer: [num_pages + 1, 2, num_kv_heads, page_size, head_dim]
        self.in_order: Sequence[Tensor] = list(kv_caches.values())
        self.num_pages, _, _, self.page_size, _ = self.in_order[0].shape
        self.stores_keys, self.stacks = attention.caps.stores_keys, attention.caps.stacks_layers

    @property
    def caps(self) -> Caps:
        return self.attention.caps

    def step_buffers(self) -> Sequence[Tensor]:
        return self.attention.step_buffers()

    def begin(self, tokens: StepTokens, shared: Any = None) -> GroupedQueryStep:
        if shared is None and tokens.common is not None:
            shared = self.attention.build(tokens.common)
        return GroupedQueryStep(self, shared, PassPlaces(tokens, self.num_pages, self.page_size))

    def can_share(self, other: Any) -> bool:
        return isinstance(other, GroupedQueryCaches) and type(other.attention) is type(self.attention)

    def adapt(self, shared: Any, seq_starts: Tensor) -> Any:
        return self.attention.starting_at(shared, seq_starts)


@dataclass(slots=True)
class GroupedQueryStep:
    caches: GroupedQueryCaches
    shared: Any  # the attention backend's metadata
    places: PassPlaces
    is_recorded: bool = False

    def run(self, layer: AttentionLayer, inputs: NewHeads) -> Tensor:
        """Norm, rotate, store keys and values, attend: [num_tokens, num_heads, head_dim]."""
        caches, (q, k, v, cos_sin, norms) = self.caches, inputs
        kv_cache, places = caches.kv_caches[layer.idx], self.places.of(cos_sin, q.dtype)
        new = NewTokens(q, k, v, *places, norms)
        if caches.stores_keys:
            out = cast(StoringBackend, caches.attention).run_new(layer, new, kv_cache, self.shared)
            if out is not None:
                return out
        if norms is not None:
            normed = rms_norm(q, norms.query, norms.eps), rms_norm(k, norms.key, norms.eps)
            new = NewTokens(*normed, *new[2:-1])
        q = rope_and_cache(new, kv_cache)
        return caches.attention.run(layer, q, kv_cache, self.shared)

    def store(self, layer: AttentionLayer, k: Tensor, v: Tensor, cos_sin: Tensor, norms: HeadNorms | None) -> None:
        """The same without attending: norm and rotate keys, store them and their values."""
        k = k if norms is None else rms_norm(k, norms.key, norms.eps)
        places = self.places.of(cos_sin, k.dtype)
        rope_and_cache(NewTokens(k[:, :0], k, v, *places), self.caches.kv_caches[layer.idx])

    def make_output(self, inputs: NewHeads) -> Tensor:
        return torch.zeros(inputs.q.shape, dtype=inputs.q.dtype, device=inputs.q.device)

    def in_place(self) -> CommonAttentionMetadata | None:
        """The batch, if all layers may run as one causal operation that reads and writes the caches itself."""
        if not self.caches.stacks:
            return None
        common = cast(StackingBackend, self.caches.attention).in_place(self.shared)
        return common if common is not None and common.is_causal else None


def serve_layers(attention: AttentionBackend, kv_caches: Sequence[Tensor]) -> CacheGroups:
    """The caches of a network with grouped-query attention only, over existing memory: one tensor per layer."""
    _, _, num_kv_heads, _, head_dim = kv_caches[0].shape
    spec, by_layer = GroupedQuerySpec(num_kv_heads, head_dim), dict(enumerate(kv_caches))
    memory = {idx: (cache,) for idx, cache in by_layer.items()}
    return CacheGroups([CacheGroup(spec, tuple(by_layer), memory, GroupedQueryCaches(attention, by_layer))])
