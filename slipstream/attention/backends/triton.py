"""The backend for GPUs: Triton kernels that read every length on the device, so any batch can be captured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from slipstream.attention.backend import AttentionLayer, Caps
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.kernels.attention.cascade_attention import cascade_attention
from slipstream.kernels.attention.decode_attention import decode_attention
from slipstream.kernels.attention.exact_attention import exact_attention
from slipstream.kernels.attention.rope_cache import NewTokens
from slipstream.kernels.attention.triton_attention import MAX_ROWS, triton_attention


@dataclass(frozen=True, slots=True)
class TritonMetadata:
    common: CommonAttentionMetadata
    query_len: int  # of every request, padding included; 0 for a mixed batch


class TritonBackend:
    caps: ClassVar[Caps] = Caps(
        dtypes=("float32", "bfloat16", "float16"), host_lengths="none", graph_support="always", stores_keys=True
    )

    def step_buffers(self) -> tuple[Tensor, ...]:
        return ()

    def build(self, common: CommonAttentionMetadata) -> TritonMetadata:
        num_reqs, num_tokens = common.seq_lens.shape[0], common.slot_mapping.shape[0]
        # Both the step and its padded form must be uniform: either alone may be a mixed batch with a matching sum.
        is_uniform = common.num_reqs * common.max_query_len == common.num_actual_tokens
        is_uniform = is_uniform and num_reqs * common.max_query_len == num_tokens
        return TritonMetadata(common, common.max_query_len if is_uniform else 0)

    def starting_at(self, metadata: TritonMetadata, seq_starts: Tensor) -> TritonMetadata:
        return replace(metadata, common=replace(metadata.common, seq_starts=seq_starts, num_common_pages=0))

    def run_new(
        self, layer: AttentionLayer, new: NewTokens, kv_cache: Tensor, metadata: TritonMetadata
    ) -> Tensor | None:
        """For a batch with few query tokens per request, the same for all, and full rotary heads."""
        rows = metadata.query_len * (layer.num_heads // layer.num_kv_heads)
        if not 0 < rows <= MAX_ROWS or new.cos.shape[-1] != layer.head_dim or layer.head_dim % 2:
            return None
        common = metadata.common
        if _is_cascade(layer, common):
            return None
        requests, is_causal = common.requests, common.is_causal
        return decode_attention(new, kv_cache, requests, metadata.query_len, layer.scale, layer.window, is_causal)

    def run(self, layer: AttentionLayer, q: Tensor, kv_cache: Tensor, metadata: TritonMetadata) -> Tensor:
        common, query_len = metadata.common, metadata.query_len
        if _is_cascade(layer, common):
            assert common.seq_starts is None, "a drafter's keys may begin at any slot"
            num_common = common.num_common_pages * kv_cache.shape[3]
            return cascade_attention(q, kv_cache, common.requests, layer.scale, query_len, num_common)
        requests, is_causal = common.requests, common.is_causal
        return triton_attention(q, kv_cache, requests, layer.scale, layer.window, query_len, is_causal)


class ExactTritonBackend(TritonBackend):
    """The same for ``--exact``: one kernel for every number of query tokens, which reads keys from the cache alone."""

    caps: ClassVar[Caps] = replace(TritonBackend.caps, stores_keys=False)

    def run(self, layer: AttentionLayer, q: Tensor, kv_cache: Tensor, metadata: TritonMetadata) -> Tensor:
        requests, query_len = metadata.common.requests, metadata.query_len
        assert metadata.common.is_causal
        return exact_attention(q, kv_cache, requests, layer.scale, layer.window, query_len)


def _is_cascade(layer: AttentionLayer, common: CommonAttentionMetadata) -> bool:
    """A layer with a window reads nearby keys, of which few are common."""
    return common.num_common_pages > 0 and not layer.window
