"""The backend for GPUs: Triton kernels that read every length on the device, so any batch can be recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from slipstream.attention.backend import AttentionLayer, Caps
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.kernels.triton_attention import triton_attention


@dataclass(frozen=True, slots=True)
class TritonMetadata:
    common: CommonAttentionMetadata
    query_len: int  # of every request, padding included; 0 for a mixed batch


class TritonBackend:
    caps: ClassVar[Caps] = Caps(dtypes=("float32", "bfloat16", "float16"), host_lengths="none", graph_support="always")

    def step_buffers(self) -> tuple[Tensor, ...]:
        return ()

    def build(self, common: CommonAttentionMetadata) -> TritonMetadata:
        num_reqs, num_tokens = common.seq_lens.shape[0], common.slot_mapping.shape[0]
        # Of the step itself and with its padding: either alone may be a mixed batch that only happens to add up.
        is_uniform = common.num_reqs * common.max_query_len == common.num_actual_tokens
        is_uniform = is_uniform and num_reqs * common.max_query_len == num_tokens
        return TritonMetadata(common, common.max_query_len if is_uniform else 0)

    def run(self, layer: AttentionLayer, q: Tensor, kv_cache: Tensor, metadata: TritonMetadata) -> Tensor:
        common = metadata.common
        tables = (common.query_start_loc, common.query_lens, common.seq_lens, common.block_table)
        return triton_attention(q, kv_cache, *tables, layer.scale, layer.window, metadata.query_len)
