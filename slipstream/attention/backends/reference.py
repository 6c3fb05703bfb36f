"""The reference backend: plain torch, paged, any mix of prefill and decode. The others are tested against it."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from slipstream.attention.backend import AttentionLayer, Caps
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.kernels.attention.paged_attention import paged_attention


class ReferenceBackend:
    caps: ClassVar[Caps] = Caps(
        dtypes=("float64", "float32", "bfloat16", "float16"), host_lengths="none", graph_support="always"
    )

    def step_buffers(self) -> tuple[Tensor, ...]:
        return ()

    def build(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        return common

    def starting_at(self, metadata: CommonAttentionMetadata, seq_starts: Tensor) -> CommonAttentionMetadata:
        return replace(metadata, seq_starts=seq_starts)

    def run(self, layer: AttentionLayer, q: Tensor, kv_cache: Tensor, metadata: CommonAttentionMetadata) -> Tensor:
        return paged_attention(q, kv_cache, metadata.requests, layer.scale, layer.window, metadata.is_causal)
