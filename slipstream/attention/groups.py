"""A network's caches: layers with equal specs form a group with its own memory and one backend.

Groups with paged memory share the page ids that the scheduler assigns; memory of rows is indexed by a request's row.
Nothing here knows a kind of cache: a spec states its needs, and opens its backend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from slipstream.attention.backend import Caps
from slipstream.attention.context import AttentionContext, GroupStep, StepTokens
from slipstream.cache_spec import CacheSpec, Shape, memory_owners
from slipstream.config import EngineConfig

LayerMemory = tuple[Tensor, ...]  # one tensor for each shape of the spec, pages before rows


class CacheBackend(Protocol):
    """Serves the layers of one group. It owns their memory, and nothing else reads or writes it."""

    @property
    def caps(self) -> Caps: ...

    def step_buffers(self) -> Sequence[Tensor]:
        """Memory of the backend that every step fills. Debug runs poison it before."""
        ...

    def begin(self, tokens: StepTokens, shared: Any = None) -> GroupStep:
        """Once per pass: build what the layers read. Must not synchronise with the device.

        ``shared`` is the result of ``adapt`` on another network's pass over the same batch.
        """
        ...

    def can_share(self, other: Any) -> bool:
        """Whether a pass here can reuse metadata of the other backend's pass."""
        ...

    def adapt(self, shared: Any, seq_starts: Tensor) -> Any:
        """That metadata, for a drafter that has keys of each request from these slots on only."""
        ...


# For layers whose memory is keys and values of a text, or of an encoder's output.
OpenGroupedQuery = Callable[[CacheSpec, Mapping[int, LayerMemory]], CacheBackend]


class CacheGroup(NamedTuple):
    spec: CacheSpec
    layer_ids: tuple[int, ...]
    memory: Mapping[int, LayerMemory]  # by layer
    backend: CacheBackend


class CacheSizes(NamedTuple):
    num_pages: int  # page 0, the null page, included
    page_size: int
    num_rows: int  # the scratch row included
    num_drafts: int
    dtype: str

    @classmethod
    def from_config(cls, config: EngineConfig) -> CacheSizes:
        cache, num_rows = config.cache, config.scheduler.max_num_seqs + 1
        return cls(cache.num_pages, cache.page_size, num_rows, config.num_drafts, config.dtype)


@dataclass(frozen=True)
class GroupSetting:
    """The arguments with which a spec opens its backend."""

    config: EngineConfig
    device: torch.device
    memory: Mapping[int, LayerMemory]
    open_grouped_query: OpenGroupedQuery  # the backend that the engine chose for such layers


def allocate(spec: CacheSpec, sizes: CacheSizes, device: torch.device) -> LayerMemory:
    """The memory of one layer, all zeros.

    The page after the last receives writes of tokens without a slot. Page 0, the null page, and the last row, which is
    for padding, stay zero.
    """
    pages = [_zeros(sizes.num_pages + 1, shape, sizes.dtype, device) for shape in spec.page_shapes(sizes.page_size)]
    rows = [_zeros(sizes.num_rows, shape, sizes.dtype, device) for shape in spec.row_shapes(sizes.num_drafts)]
    return (*pages, *rows)


def _zeros(count: int, shape: Shape, model_dtype: str, device: torch.device) -> Tensor:
    size, dtype = (count, *shape.size), getattr(torch, shape.dtype_name(model_dtype))
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    # Memory of a CPU is mapped as zeros, which costs nothing until it is touched.
    memory = np.zeros(math.prod(size) * dtype.itemsize, np.uint8)
    return torch.from_numpy(memory).view(dtype).view(size)


class CacheGroups:
    """All caches of one network."""

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        self.groups = tuple(groups)
        group_idx = {layer: i for i, group in enumerate(self.groups) for layer in group.layer_ids}
        self._group_of_layer = [group_idx[layer] for layer in range(len(group_idx))]
        self._backends = [group.backend for group in self.groups]
        self.caps = _join_caps([backend.caps for backend in self._backends])

    @classmethod
    def open(
        cls,
        specs: Sequence[CacheSpec],  # of each layer
        config: EngineConfig,
        device: torch.device,
        open_grouped_query: OpenGroupedQuery,
    ) -> CacheGroups:
        sizes, groups = CacheSizes.from_config(config), []
        owners, allocated = memory_owners(specs), dict[int, LayerMemory]()
        for idx, owner in enumerate(owners):
            if owner == idx:
                allocated[idx] = allocate(specs[idx], sizes, device)
        for spec in dict.fromkeys(specs):
            layer_ids = tuple(idx for idx, own in enumerate(specs) if own == spec)
            memory = {idx: allocated[owners[idx]] for idx in layer_ids}
            setting = GroupSetting(config, device, memory, open_grouped_query)
            groups.append(CacheGroup(spec, layer_ids, memory, spec.open(setting)))
        return cls(groups)

    def begin(
        self, tokens: StepTokens, taps: Mapping[int, Tensor] | None = None, shared: Sequence[Any] | None = None
    ) -> AttentionContext:
        """Begin a pass over the tokens; ``shared`` comes from ``adapt``."""
        if shared is None:
            steps = [backend.begin(tokens) for backend in self._backends]
        else:
            steps = [backend.begin(tokens, own) for backend, own in zip(self._backends, shared, strict=True)]
        return AttentionContext(steps, self._group_of_layer, tokens.positions, tokens.slot_mapping, taps or {})

    def can_share(self, other: CacheGroups) -> bool:
        """Whether passes can reuse what the other network's pass over the same batch has built."""
        return all(self._partner(backend, other) is not None for backend in self._backends)

    def adapt(self, other: CacheGroups, shared: Sequence[Any], seq_starts: Tensor) -> list[Any]:
        """Convert what the other network's pass has built for a pass of this one: see ``CacheBackend.adapt``."""
        found = []
        for backend in self._backends:
            partner = self._partner(backend, other)
            assert partner is not None, "the networks share nothing"
            found.append(backend.adapt(shared[partner], seq_starts))
        return found

    @staticmethod
    def _partner(backend: CacheBackend, other: CacheGroups) -> int | None:
        return next((i for i, theirs in enumerate(other._backends) if backend.can_share(theirs)), None)

    def store_encoded(self, layer_idx: int, keys: Tensor, values: Tensor, page_ids: Tensor) -> None:
        """What a layer keeps of one request's encoder output; ``page_ids`` are those of its row."""
        backend: Any = self._backends[self._group_of_layer[layer_idx]]
        backend.store(layer_idx, keys, values, page_ids)

    def step_buffers(self) -> list[Tensor]:
        return [buffer for backend in self._backends for buffer in backend.step_buffers()]

    def paged_memory(self) -> Iterator[Tensor]:
        """Every tensor that is indexed by page ids."""
        for group in self.groups:
            num_paged = len(group.spec.page_shapes(1))
            for memory in group.memory.values():
                yield from memory[:num_paged]

    def row_memory(self) -> Iterator[Tensor]:
        """Every tensor that is indexed by request rows."""
        for group in self.groups:
            num_paged = len(group.spec.page_shapes(1))
            for memory in group.memory.values():
                yield from memory[num_paged:]


def _join_caps(caps: Sequence[Caps]) -> Caps:
    """The capabilities of a pass over all groups: the minimum over the groups."""
    lengths, support = ("none", "bound", "exact"), ("never", "decode", "always")
    return Caps(
        dtypes=tuple(name for name in caps[0].dtypes if all(name in own.dtypes for own in caps)),
        host_lengths=max((own.host_lengths for own in caps), key=lengths.index),
        graph_support=min((own.graph_support for own in caps), key=support.index),
    )
