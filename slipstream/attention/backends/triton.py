"""The backend for GPUs: Triton kernels that read every length on the device, so any batch can be captured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from torch import Tensor

from slipstream.attention.backend import AttentionLayer, Caps
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.kernels.attention.cascade_attention import cascade_attention
from slipstream.kernels.attention.decode_attention import decode_attention
from slipstream.kernels.attention.exact_attention import exact_attention
from slipstream.kernels.attention.mixed_attention import mixed_attention
from slipstream.kernels.attention.paged_attention import PagedRequests
from slipstream.kernels.attention.rope_cache import NewTokens
from slipstream.kernels.attention.tma_attention import can_use_tma, tma_attention
from slipstream.kernels.attention.triton_attention import MAX_ROWS, can_split, triton_attention


class MixedParts(NamedTuple):
    """The two ranges of a batch with decodes and prompts."""

    decodes: PagedRequests
    prompts: PagedRequests  # padding included
    query_len: int  # of every decode


@dataclass(frozen=True, slots=True)
class TritonMetadata:
    common: CommonAttentionMetadata
    query_len: int  # of every request, padding included; 0 for a mixed batch
    parts: MixedParts | None = None  # of a mixed batch, where both kinds have a kernel of their own


class TritonBackend:
    caps: ClassVar[Caps] = Caps(
        dtypes=("float32", "bfloat16", "float16"), host_lengths="none", graph_support="always", stores_keys=True
    )

    def __init__(self, mixed_attention: str = "together", prompt_kernel: str = "pointers") -> None:
        self._takes_apart, self._with_tma = mixed_attention == "apart", prompt_kernel == "tma"

    def step_buffers(self) -> tuple[Tensor, ...]:
        return ()

    def build(self, common: CommonAttentionMetadata) -> TritonMetadata:
        num_reqs, num_tokens = common.seq_lens.shape[0], common.slot_mapping.shape[0]
        # Both the step and its padded form must be uniform: either alone may be a mixed batch with a matching sum.
        is_uniform = common.num_reqs * common.max_query_len == common.num_actual_tokens
        is_uniform = is_uniform and num_reqs * common.max_query_len == num_tokens
        if is_uniform:
            return TritonMetadata(common, common.max_query_len)
        return TritonMetadata(common, 0, _take_apart(common) if self._takes_apart else None)

    def starting_at(self, metadata: TritonMetadata, seq_starts: Tensor) -> TritonMetadata:
        common = replace(metadata.common, seq_starts=seq_starts, num_common_pages=0)
        parts = None if metadata.parts is None else _take_apart(common)
        return replace(metadata, common=common, parts=parts)

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
        common, query_len, parts = metadata.common, metadata.query_len, metadata.parts
        if _is_cascade(layer, common):
            assert common.seq_starts is None, "a drafter's keys may begin at any slot"
            num_common = common.num_common_pages * kv_cache.shape[3]
            return cascade_attention(q, kv_cache, common.requests, layer.scale, query_len, num_common)
        requests, is_causal, group = common.requests, common.is_causal, layer.num_heads // layer.num_kv_heads
        if parts is not None and can_split(parts.query_len, group):
            return mixed_attention(q, kv_cache, *parts, layer.scale, layer.window, self._with_tma)
        may_use_tma = self._with_tma and is_causal and not can_split(query_len, group)
        if may_use_tma and can_use_tma(q, kv_cache, requests):
            return tma_attention(q, kv_cache, requests, layer.scale, layer.window)
        return triton_attention(q, kv_cache, requests, layer.scale, layer.window, query_len, is_causal)


class ExactTritonBackend(TritonBackend):
    """The same for ``--exact``: one kernel for every number of query tokens, which reads keys from the cache alone."""

    caps: ClassVar[Caps] = replace(TritonBackend.caps, stores_keys=False)

    def run(self, layer: AttentionLayer, q: Tensor, kv_cache: Tensor, metadata: TritonMetadata) -> Tensor:
        requests, query_len = metadata.common.requests, metadata.query_len
        assert metadata.common.is_causal
        return exact_attention(q, kv_cache, requests, layer.scale, layer.window, query_len)


def _take_apart(common: CommonAttentionMetadata) -> MixedParts | None:
    """Decodes and prompts of a batch, by what the host knows; None where it has one kind, or the host does not know."""
    num_decodes = common.num_decodes
    if not 0 < num_decodes < common.num_reqs or not common.is_causal:
        return None
    num_tokens = int(common.query_start_loc_cpu[num_decodes])
    starts, whole = common.query_start_loc, common.requests

    def part(own: slice, starts: Tensor) -> PagedRequests:
        seq_starts = None if whole.seq_starts is None else whole.seq_starts[own]
        return PagedRequests(starts, whole.query_lens[own], whole.seq_lens[own], whole.block_table[own], seq_starts)

    return MixedParts(
        decodes=part(slice(num_decodes), starts[: num_decodes + 1]),
        prompts=part(slice(num_decodes, None), starts[num_decodes:] - num_tokens),
        query_len=num_tokens // num_decodes,
    )


def _is_cascade(layer: AttentionLayer, common: CommonAttentionMetadata) -> bool:
    """A layer with a window reads nearby keys, of which few are common."""
    return common.num_common_pages > 0 and not layer.window
