"""A smaller model with the same vocabulary drafts, token by token.

Its only input from the target is the tokens. Its keys and values are in its own tensors under the target's page ids, so
sharing, caching and releasing pages applies to both. After every step it processes what the target computed, unshifted,
with the new token, which gives the first draft; each further draft is a pass over the one before.

The token that the target has just sampled is not among those it computed, hence one more slot per request in the first
pass. With ``match`` drafts are sampled with the target's noise, since equal distributions then sample equal tokens;
with ``rejection`` with their own noise, as speculative sampling requires.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from slipstream.attention.context import AttentionContext
from slipstream.attention.groups import CacheGroups
from slipstream.config import EngineConfig
from slipstream.device.interface import Device
from slipstream.graphs.descriptor import BatchExecutionDescriptor
from slipstream.kernels.request_rows import RowState
from slipstream.models.source_encoder import SourceEncoder
from slipstream.speculate.autoregressive import AutoRegressiveSpeculator
from slipstream.speculate.draft_graphs import FirstSize
from slipstream.speculate.draft_inputs import FirstPassInputs, prepare_first_pass
from slipstream.speculate.speculator import DraftBatch, GraphSetting, TargetAttention

# Tokens of a decoding request in the first pass: the one before the new token, and the new one.
_FIRST_QUERY_LEN = 2


class Model(Protocol):
    @property
    def source_encoder(self) -> SourceEncoder | None: ...

    def forward(self, input_ids: Tensor, context: AttentionContext) -> Tensor: ...

    def compute_logits(self, hidden: Tensor) -> Tensor: ...


class DraftModelSpeculator(AutoRegressiveSpeculator):
    """It needs only tokens. Those it has missed it processes in its next pass: it has no follower."""

    def __init__(self, config: EngineConfig, device: Device, model: Model, caches: CacheGroups, rows: RowState) -> None:
        super().__init__(config, device, caches, rows)
        assert config.draft_model is not None
        self._model, self.encoder = model, model.source_encoder
        self._draft_vocab_size = config.draft_model.vocab_size
        self._columns = self._num_columns(config)

    def _num_columns(self, config: EngineConfig) -> int:
        assert config.draft_model is not None
        return min(config.model.vocab_size, config.draft_model.vocab_size)  # tokens that both have

    def first_size(self, batch: DraftBatch) -> FirstSize:
        return FirstSize(int(batch.start_loc_cpu[-1]), batch.query_len)

    def first_query_lens(self, lengths: Sequence[int]) -> Sequence[int]:
        return (_FIRST_QUERY_LEN,)

    def static_batch(self, desc: BatchExecutionDescriptor, setting: GraphSetting) -> DraftBatch:
        return setting.batch.static(desc.num_reqs, desc.num_tokens, desc.query_len, setting.max_len, 1)

    def first_ids(self, batch: DraftBatch) -> Tensor:
        self._find_gaps(batch)
        num_reqs = batch.padded_reqs
        inputs = FirstPassInputs(
            tokens=self._tokens(batch.num_tokens),
            query_lens=self._query_lens[:num_reqs],
            seq_lens=self._seq_lens[:num_reqs],
            draft_positions=self._draft_positions[:num_reqs],
            last_indices=self._last_indices[:num_reqs],
            block_table=self._block_table[:num_reqs],
        )
        prepare_first_pass(
            self._rows,
            batch.rows,
            batch.start_loc,
            self._first_slots[:num_reqs],
            batch.num_caught_up,
            self._page_size,
            self._draft_vocab_size,
            inputs,
        )
        return inputs.tokens.input_ids

    def first_context(self, batch: DraftBatch, target: TargetAttention | None = None) -> AttentionContext:
        starts, bounds = batch.start_loc_cpu, np.minimum(batch.seq_lens_bound, self._max_len)
        return self.context(batch, batch.num_tokens, batch.start_loc, starts, batch.max_query_len, bounds)

    def forward(self, input_ids: Tensor, context: AttentionContext) -> Tensor:
        return self._model.forward(input_ids, context)

    def _next(
        self, idx: int, num_drafts: int, input_ids: Tensor, left: Tensor | None, context: AttentionContext
    ) -> Tensor:
        return self._model.forward(input_ids, context)

    def _logits(self, idx: int, hidden: Tensor) -> Tensor:
        return self._model.compute_logits(hidden)[:, : self._columns]
