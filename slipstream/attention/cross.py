"""Cross attention: every query token of a request sees the whole output of its encoder.

Keys and values of that output are computed once, by the step that admits the request, and are only read afterwards.
They are in pages of the same pool as those of the text, but indexed by the encoder's entries: a page table of its own.
How many entries there are does not change from step to step, nor with drafts. So the metadata of a pass needs nothing
of the requests' lengths: neither those on the device nor how many tokens the host takes for computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn, cast

import numpy as np
from torch import Tensor

from slipstream.attention.backend import AttentionBackend, AttentionLayer, Caps, StackingBackend
from slipstream.attention.context import StepTokens
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.cache_spec import CacheSpec, GroupedQuerySpec, KeyValueType
from slipstream.kernels.attention.encoder_cache import gather_encoder_pages, store_encoded


@dataclass(frozen=True)
class CrossSpec(CacheSpec):
    """Keys and values of an encoder's output."""

    num_kv_heads: int
    head_dim: int
    max_entries: int
    dtype: KeyValueType = "model"

    indexed_by: ClassVar = "encoder"
    exact_refusal: ClassVar[str] = "the model reads an encoder's output, whose products depend on the batch"

    @property
    def keys_and_values(self) -> GroupedQuerySpec:
        """The same of a text."""
        return GroupedQuerySpec(self.num_kv_heads, self.head_dim, self.dtype)

    def page_shapes(self, page_size: int) -> Any:
        return self.keys_and_values.page_shapes(page_size)

    def with_keys_in(self, dtype: KeyValueType) -> CrossSpec:
        return replace(self, dtype=dtype)

    def open(self, setting: Any) -> CrossBackend:
        caches = setting.open_grouped_query(self, setting.memory)
        return CrossBackend(caches.attention, caches.kv_caches, self.max_entries)


class CrossBackend:
    """The keys and values of a group of layers, and the attention backend that reads them."""

    def __init__(self, attention: AttentionBackend, kv_caches: Mapping[int, Tensor], max_entries: int) -> None:
        self.attention, self.kv_caches = attention, kv_caches
        self.in_order: Sequence[Tensor] = list(kv_caches.values())
        self._max_entries = max_entries

    @property
    def caps(self) -> Caps:
        return replace(self.attention.caps, stores_keys=False, stacks_layers=False)

    def step_buffers(self) -> tuple[Tensor, ...]:
        return ()

    def store(self, layer_idx: int, keys: Tensor, values: Tensor, page_ids: Tensor) -> None:
        """The output of one request's encoder; ``page_ids`` are its row's on the device."""
        store_encoded(keys, values, page_ids, self.kv_caches[layer_idx])

    def begin(self, tokens: StepTokens, shared: Any = None) -> CrossStep:
        assert tokens.common is not None, "tokens without a batch see no encoder"
        return CrossStep(self, tokens.common)

    def can_share(self, other: Any) -> bool:
        return isinstance(other, CrossBackend)  # there is nothing to share

    def adapt(self, shared: Any, seq_starts: Tensor) -> None:
        return None

    def build(self, common: CommonAttentionMetadata) -> Any:
        """Launches, and the largest number of entries where the host needs a bound."""
        assert common.encoder is not None, "the rows have no pages of an encoder"
        assert common.batch_rows is not None, "an encoder's pages are found by rows, which the pass lacks"
        table, lens = gather_encoder_pages(common.encoder, common.batch_rows)
        whole = replace(
            common,
            seq_lens=lens,
            seq_lens_cpu_upper_bound=np.full(common.num_reqs, self._max_entries, dtype=np.int32),
            block_table=table,
            seq_starts=None,
            num_computed_cpu=None,
            is_causal=False,
            num_common_pages=0,
        )
        return self.attention.build(whole)


@dataclass(slots=True)
class CrossStep:
    """One pass. The first layer builds the metadata, so that a graph of that layer contains it."""

    backend: CrossBackend
    common: CommonAttentionMetadata
    shared: None = None
    is_recorded: bool = True  # every length is read on the device
    _metadata: Any = None

    def run(self, layer: AttentionLayer, q: Tensor) -> Tensor:
        """[num_tokens, num_heads, head_dim]; zero for padding."""
        return self.backend.attention.run(layer, q, self.backend.kv_caches[layer.idx], self._built())

    def in_place(self) -> CommonAttentionMetadata | None:
        """The batch with its encoders' pages, if all layers may run as one operation that reads them itself."""
        attention = self.backend.attention
        return cast(StackingBackend, attention).in_place(self._built()) if attention.caps.stacks_layers else None

    def _built(self) -> Any:
        if self._metadata is None:
            self._metadata = self.backend.build(self.common)
        return self._metadata

    def make_output(self, inputs: Tensor) -> NoReturn:
        raise RuntimeError("cross attention is part of a captured piece")
