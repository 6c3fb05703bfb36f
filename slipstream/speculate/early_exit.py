"""The target's first layers draft, token by token, with its final norm and its head after them.

Their keys and values of a token are the target's own, so the drafter has no caches: its passes read the target's and
go on writing where the target's next step will write the same, or something else where a draft is rejected. It has
therefore nothing to catch up with: its first pass is over the newest token alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

import numpy as np
from torch import Tensor

from slipstream.attention.context import AttentionContext
from slipstream.attention.groups import CacheGroups
from slipstream.config import EngineConfig
from slipstream.device.interface import Device
from slipstream.graphs.descriptor import BatchExecutionDescriptor
from slipstream.kernels.request_rows import RowState
from slipstream.speculate.autoregressive import AutoRegressiveSpeculator
from slipstream.speculate.draft_graphs import FirstSize
from slipstream.speculate.draft_inputs import FirstPassInputs, prepare_first_pass
from slipstream.speculate.speculator import DraftBatch, GraphSetting, TargetAttention


class LayeredModel(Protocol):
    def forward_first(self, input_ids: Tensor, context: AttentionContext, num_layers: int) -> Tensor: ...

    def compute_logits(self, hidden: Tensor) -> Tensor: ...


class EarlyExitSpeculator(AutoRegressiveSpeculator):
    has_gaps: ClassVar[bool] = False

    def __init__(
        self,
        config: EngineConfig,
        device: Device,
        layers: tuple[LayeredModel, int],  # the target, and how many of its layers draft
        caches: CacheGroups,  # the target's
        rows: RowState,
    ) -> None:
        super().__init__(config, device, caches, rows)
        self._model, self._num_layers = layers
        self._vocab_size = config.model.vocab_size

    def _num_columns(self, config: EngineConfig) -> int:
        return config.model.vocab_size

    def first_size(self, batch: DraftBatch) -> FirstSize:
        return FirstSize(batch.num_reqs, 1)

    def first_query_lens(self, lengths: Sequence[int]) -> Sequence[int]:
        return (1,)

    def static_batch(self, desc: BatchExecutionDescriptor, setting: GraphSetting) -> DraftBatch:
        return setting.batch.static(desc.num_reqs, desc.num_tokens, desc.query_len, setting.max_len, 1)

    def first_ids(self, batch: DraftBatch) -> Tensor:
        num_reqs = batch.padded_reqs
        inputs = FirstPassInputs(
            tokens=self._tokens(num_reqs),
            query_lens=self._query_lens[:num_reqs],
            seq_lens=self._seq_lens[:num_reqs],
            draft_positions=self._draft_positions[:num_reqs],
            last_indices=self._last_indices[:num_reqs],
            block_table=self._block_table[:num_reqs],
        )
        rows, starts = self._rows, self._one_each[: num_reqs + 1]
        # From what is computed on: one token, or none within a prompt.
        firsts = rows.num_computed.index_select(0, batch.rows)
        prepare_first_pass(rows, batch.rows, starts, firsts, 0, self._page_size, self._vocab_size, inputs)
        inputs.last_indices.copy_(starts[:-1])
        return inputs.tokens.input_ids

    def first_context(self, batch: DraftBatch, target: TargetAttention | None = None) -> AttentionContext:
        num_reqs, bounds = batch.padded_reqs, np.minimum(batch.seq_lens_bound, self._max_len)
        starts = np.arange(batch.num_reqs + 1, dtype=np.int32)
        return self.context(batch, num_reqs, self._one_each[: num_reqs + 1], starts, 1, bounds)

    def forward(self, input_ids: Tensor, context: AttentionContext) -> Tensor:
        return self._model.forward_first(input_ids, context, self._num_layers)

    def _next(
        self, idx: int, num_drafts: int, input_ids: Tensor, left: Tensor | None, context: AttentionContext
    ) -> Tensor:
        return self.forward(input_ids, context)

    def _logits(self, idx: int, hidden: Tensor) -> Tensor:
        return self._model.compute_logits(hidden)
