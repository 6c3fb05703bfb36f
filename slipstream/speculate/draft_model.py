"""A smaller model with the same vocabulary drafts, token after token.

It takes nothing from the target but the tokens. Its keys and values lie in tensors of its own under the target's page
ids, so pages that are shared, found again or given back are so for both. After every step it goes over what the target
computed, unshifted, with the new token, which gives the first draft; each further draft is a pass over the one before.

The token that the target has just drawn is not among those it computed, hence one slot more a request in the first
pass. Under ``match`` drafts are drawn with the target's noise, for then equal distributions draw equal tokens; under
``rejection`` with noise of their own, as speculative sampling demands.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from slipstream.attention.backend import AttentionBackend, AttentionContext
from slipstream.attention.kv_cache import allocate_kv_caches
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.config import EngineConfig
from slipstream.device.interface import Device
from slipstream.sampling.draw import draw_tokens
from slipstream.sampling.gumbel import TARGET_NOISE
from slipstream.speculate.draft_graphs import DraftGraphs
from slipstream.speculate.draft_inputs import prepare_first_pass, prepare_next_pass
from slipstream.speculate.rejection import DRAFT_NOISE
from slipstream.speculate.speculator import DraftBatch, DraftRows, GraphSetting, Int32s, Needs


class Model(Protocol):
    def forward(self, input_ids: Tensor, context: AttentionContext) -> Tensor: ...

    def compute_logits(self, hidden: Tensor) -> Tensor: ...


class DraftModelSpeculator:
    needs: ClassVar[Needs] = Needs(own_keys=True)

    def __init__(
        self, config: EngineConfig, device: Device, model: Model, backend: AttentionBackend, rows: DraftRows
    ) -> None:
        speculative = config.speculative
        assert speculative is not None
        assert config.draft_model is not None
        self._model = model
        self._backend = backend
        self._rows = rows
        self.num_drafts = speculative.num_drafts
        self._page_size = config.cache.page_size
        self._draft_vocab_size = config.draft_model.vocab_size
        self._vocab_size = min(config.model.vocab_size, self._draft_vocab_size)  # of which both know all tokens
        self._max_len = config.scheduler.max_model_len
        place, max_reqs = device.torch_device, config.scheduler.max_num_seqs
        max_tokens = config.scheduler.max_num_batched_tokens + max_reqs
        self.kv_caches = allocate_kv_caches(config.draft_model, config.cache, getattr(torch, config.dtype), place)
        self._input_ids = torch.zeros(max_tokens, dtype=torch.int32, device=place)
        self._positions = torch.zeros(max_tokens, dtype=torch.int64, device=place)
        self._slot_mapping = torch.zeros(max_tokens, dtype=torch.int64, device=place)
        self._query_lens = torch.zeros(max_reqs, dtype=torch.int32, device=place)
        self._seq_lens = torch.zeros(max_reqs, dtype=torch.int32, device=place)
        self._last_indices = torch.zeros(max_reqs, dtype=torch.int64, device=place)
        self._draft_positions = torch.zeros(max_reqs, dtype=torch.int32, device=place)
        self._draft_ids = torch.zeros(max_reqs, self.num_drafts, dtype=torch.int32, device=place)
        self._block_table = torch.zeros(max_reqs, rows.page_table.shape[1], dtype=torch.int32, device=place)
        self._one_each = torch.arange(max_reqs + 1, dtype=torch.int32, device=place)
        self._graphs: DraftGraphs | None = None
        self._purpose = TARGET_NOISE
        # Speculative sampling compares the two models' distributions, so those of the drafts are kept, by row.
        self.draft_logits: Tensor | None = None
        if speculative.verify == "rejection":
            self._purpose = DRAFT_NOISE
            shape = (rows.num_tokens.shape[0], self.num_drafts, self._vocab_size)
            self.draft_logits = torch.zeros(shape, dtype=torch.float32, device=place)

    def step_buffers(self) -> tuple[Tensor, ...]:
        tokens = (self._input_ids, self._positions, self._slot_mapping)
        lengths = (self._query_lens, self._seq_lens, self._last_indices, self._draft_positions)
        return (*tokens, *lengths, self._block_table, self._draft_ids)

    def init_graphs(self, setting: GraphSetting) -> None:
        self._graphs = DraftGraphs(self, setting)

    def capture_one_more(self) -> bool:
        return self._graphs is not None and self._graphs.capture_one_more()

    # --- drafting ---------------------------------------------------------------------------------

    def propose(self, batch: DraftBatch, noise: bool) -> Tensor:
        self.choose_first(batch, self.forward(self.first_ids(batch), self.first_context(batch)), noise)
        return self.finish(batch, noise)

    def run(self, batch: DraftBatch, noise: bool) -> Tensor:
        return self.propose(batch, noise) if self._graphs is None else self._graphs.run(batch, noise)

    def forward(self, input_ids: Tensor, context: AttentionContext) -> Tensor:
        return self._model.forward(input_ids, context)

    def choose_first(self, batch: DraftBatch, hidden: Tensor, noise: bool) -> None:
        self._choose(batch, 0, hidden.index_select(0, self._last_indices[: batch.padded_reqs]), noise)

    def first_ids(self, batch: DraftBatch) -> Tensor:
        """Queue the inputs of the first pass, and give its tokens."""
        rows, n, num_reqs = self._rows, batch.num_tokens, batch.padded_reqs
        prepare_first_pass(
            *(batch.rows, batch.start_loc, rows.token_ids, rows.page_table, rows.num_computed, rows.num_tokens),
            *(rows.max_drafts, rows.ran, self._page_size, self._draft_vocab_size),
            *(self._input_ids[:n], self._positions[:n], self._slot_mapping[:n]),
            *(self._query_lens[:num_reqs], self._seq_lens[:num_reqs], self._last_indices[:num_reqs]),
            *(self._draft_positions[:num_reqs], self._block_table[:num_reqs]),
        )
        return self._input_ids[:n]

    def first_context(self, batch: DraftBatch) -> AttentionContext:
        starts, bounds = batch.start_loc_cpu, np.minimum(batch.seq_lens_bound, self._max_len)
        return self._context(batch, batch.num_tokens, batch.start_loc, starts, batch.max_query_len, bounds)

    def finish(self, batch: DraftBatch, noise: bool) -> Tensor:
        """All drafts but the first, a pass each."""
        num_reqs = batch.padded_reqs
        drafts, starts = self._draft_ids[:num_reqs], np.arange(batch.num_reqs + 1, dtype=np.int32)
        rows = self._rows
        for idx in range(1, self.num_drafts):
            prepare_next_pass(
                *(drafts[:, idx - 1], idx, batch.rows, rows.page_table, rows.num_computed, rows.num_tokens),
                *(rows.max_drafts, rows.max_total, rows.status, self._page_size),
                *(self._input_ids[:num_reqs], self._positions[:num_reqs], self._slot_mapping[:num_reqs]),
                *(self._query_lens[:num_reqs], self._seq_lens[:num_reqs], self._draft_positions[:num_reqs]),
            )
            # The bound moves on with the device's lengths.
            bounds = np.minimum(batch.seq_lens_bound + idx, self._max_len)
            context = self._context(batch, num_reqs, self._one_each[: num_reqs + 1], starts, 1, bounds)
            self._choose(batch, idx, self._model.forward(self._input_ids[:num_reqs], context), noise)
        return drafts

    def _choose(self, batch: DraftBatch, idx: int, hidden: Tensor, noise: bool) -> None:
        """Draw one draft a request: at its temperature, without the parameters that the target looks after."""
        rows, num_reqs = self._rows, batch.padded_reqs
        logits = self._model.compute_logits(hidden)[:, : self._vocab_size]
        own = (rows.temperature, rows.seeds, self._draft_positions[:num_reqs], rows.choice)
        ids, failed = draw_tokens(logits, batch.rows, *own, noise, False, self._purpose)
        self._draft_ids[:num_reqs, idx].copy_(ids.masked_fill(failed, -1))
        if self.draft_logits is not None:
            self.draft_logits[:, idx].index_copy_(0, batch.rows.long(), logits.float())

    def _context(
        self, batch: DraftBatch, num_tokens: int, starts: Tensor, starts_cpu: Int32s, query_len: int, bounds: Int32s
    ) -> AttentionContext:
        num_reqs, slot_mapping = batch.padded_reqs, self._slot_mapping[:num_tokens]
        common = CommonAttentionMetadata(
            num_reqs=batch.num_reqs,
            num_actual_tokens=int(starts_cpu[-1]),
            max_query_len=query_len,
            query_start_loc=starts,
            query_start_loc_cpu=starts_cpu,
            query_lens=self._query_lens[:num_reqs],
            seq_lens=self._seq_lens[:num_reqs],
            seq_lens_cpu_upper_bound=bounds,
            block_table=self._block_table[:num_reqs],
            slot_mapping=slot_mapping,
        )
        return AttentionContext(
            self._backend, self._backend.build(common), self.kv_caches, self._positions[:num_tokens], slot_mapping
        )
