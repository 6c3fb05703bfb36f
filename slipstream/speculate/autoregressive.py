"""Drafting token after token with a network that keeps keys of its own: the loop, its inputs, its graphs.

A method says what its first pass goes over, and how a pass turns tokens into hidden states. The first pass gives the
first draft; each further draft is a pass over the one before, with lengths advanced on the device and the host's bounds
with them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from slipstream.attention.context import AttentionContext, StepTokens
from slipstream.attention.groups import CacheGroups
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.config import EngineConfig
from slipstream.device.interface import Device
from slipstream.graphs.descriptor import BatchExecutionDescriptor
from slipstream.kernels.prepare_inputs import TokenInputs
from slipstream.kernels.request_rows import RowState
from slipstream.sampling.draw import DrawKeys, DrawnDrafts, draw_drafts
from slipstream.sampling.gumbel import TARGET_NOISE
from slipstream.speculate.draft_gaps import mark_gaps
from slipstream.speculate.draft_graphs import DraftGraphs, FirstSize
from slipstream.speculate.draft_inputs import NextPassInputs, prepare_next_pass
from slipstream.speculate.rejection import DRAFT_NOISE, DrawnFrom
from slipstream.speculate.speculator import DraftBatch, Follower, GraphSetting, Int32s, TargetAttention


class AutoRegressiveSpeculator(ABC):
    # How many slots before a token's own its keys lie: 1 where a token is paired with the hidden state before it.
    slots_before: ClassVar[int] = 0
    shares_states: bool = False
    follower: Follower | None = None
    draft_columns: Tensor | None = None  # see ``DrawnFrom``

    def __init__(self, config: EngineConfig, device: Device, caches: CacheGroups, rows: RowState) -> None:
        speculative = config.speculative
        assert speculative is not None
        self.caches = caches
        self._rows = rows
        self.num_drafts = speculative.num_drafts
        self._page_size = config.cache.page_size
        self._max_len = config.scheduler.max_model_len
        place, max_reqs = device.torch_device, config.scheduler.max_num_seqs
        self._dtype = getattr(torch, config.dtype)
        # A first pass may have a token more a request than the target's.
        max_tokens = config.scheduler.max_num_batched_tokens + max_reqs
        self._input_ids = torch.zeros(max_tokens, dtype=torch.int32, device=place)
        self._positions = torch.zeros(max_tokens, dtype=torch.int64, device=place)
        self._slot_mapping = torch.zeros(max_tokens, dtype=torch.int64, device=place)
        self._query_lens = torch.zeros(max_reqs, dtype=torch.int32, device=place)
        self._seq_lens = torch.zeros(max_reqs, dtype=torch.int32, device=place)
        self._last_indices = torch.zeros(max_reqs, dtype=torch.int64, device=place)
        self._draft_positions = torch.zeros(max_reqs, dtype=torch.int32, device=place)
        self._draft_ids = torch.zeros(max_reqs, self.num_drafts, dtype=torch.int32, device=place)
        self._block_table = torch.zeros(max_reqs, rows.page_table.shape[1], dtype=torch.int32, device=place)
        self._seq_starts = torch.zeros(max_reqs, dtype=torch.int32, device=place)
        self._first_slots = torch.zeros(max_reqs, dtype=torch.int32, device=place)
        self._one_each = torch.arange(max_reqs + 1, dtype=torch.int32, device=place)
        self._graphs: DraftGraphs | None = None
        self._purpose = DRAFT_NOISE if speculative.verify == "rejection" else TARGET_NOISE
        # Speculative sampling compares the two models' distributions, so those of the drafts are kept, by row.
        self.draft_logits: Tensor | None = None
        if speculative.verify == "rejection":
            shape = (rows.num_tokens.shape[0], self.num_drafts, self._num_columns(config))
            self.draft_logits = torch.zeros(shape, dtype=torch.float32, device=place)

    # --- what a method says -----------------------------------------------------------------------

    @abstractmethod
    def _num_columns(self, config: EngineConfig) -> int:
        """How many tokens a draft is drawn from."""

    @abstractmethod
    def first_size(self, batch: DraftBatch) -> FirstSize:
        """How many tokens the first pass has."""

    @abstractmethod
    def first_query_lens(self, lengths: Sequence[int]) -> Sequence[int]:
        """How many of them a request has that decodes, when it may have so many drafts."""

    @abstractmethod
    def static_batch(self, desc: BatchExecutionDescriptor, setting: GraphSetting) -> DraftBatch:
        """A batch for the recording of a first pass."""

    @abstractmethod
    def first_ids(self, batch: DraftBatch) -> Tensor:
        """Queue the inputs of the first pass, and give its tokens."""

    @abstractmethod
    def first_context(self, batch: DraftBatch, target: TargetAttention | None = None) -> AttentionContext:
        """The caches of the first pass; ``target`` is what the target's pass has built, where that is of use."""

    @abstractmethod
    def forward(self, input_ids: Tensor, context: AttentionContext) -> Tensor:
        """The first pass: [padded_tokens, hidden]."""

    @abstractmethod
    def _next(
        self, idx: int, num_drafts: int, input_ids: Tensor, left: Tensor | None, context: AttentionContext
    ) -> Tensor:
        """A later pass, to find draft ``idx`` of so many: [padded_reqs, hidden].

        What the one before has left, as drafts were drawn from it, comes along; None where that was the first pass.
        """

    @abstractmethod
    def _logits(self, idx: int, hidden: Tensor) -> Tensor:
        """Of draft ``idx``: [n, hidden] -> [n, columns]."""

    def _chosen(self, hidden: Tensor, places: Tensor | None = None) -> Tensor:
        """What a pass has left, as it is drawn from: all of it, or of a first pass these tokens.

        A method that wants to see the latter again must keep it: the later passes may be another graph.
        """
        return hidden if places is None else hidden.index_select(0, places)

    def taps(self, num_tokens: int) -> Mapping[int, Tensor]:
        return {}

    @property
    def _target_ids(self) -> Tensor | None:
        """Tokens of the columns that drafts are drawn from; None where they are the first so many."""
        return None

    # --- what is the same for all -----------------------------------------------------------------

    def _find_gaps(self, batch: DraftBatch) -> None:
        """Where the step before made no drafts, its tokens have no keys here: attention begins behind them.

        Unless the pass goes over them now.
        """
        # A pass in the target's shape has the target's padding, whatever that of the drafts is.
        num_reqs = max(batch.padded_reqs, batch.step.attention.seq_lens.shape[0])
        places = (self._seq_starts[:num_reqs], self._first_slots[:num_reqs])
        mark_gaps(batch.all_rows[:num_reqs], self._rows, self.shares_states, batch.num_caught_up, *places)

    def _tokens(self, num_tokens: int) -> TokenInputs:
        buffers = (self._input_ids, self._positions, self._slot_mapping)
        return TokenInputs(*(buffer[:num_tokens] for buffer in buffers))

    def step_buffers(self) -> tuple[Tensor, ...]:
        tokens = (self._input_ids, self._positions, self._slot_mapping)
        lengths = (self._query_lens, self._seq_lens, self._last_indices, self._draft_positions)
        return (*tokens, *lengths, self._seq_starts, self._first_slots, self._block_table, self._draft_ids)

    def init_graphs(self, setting: GraphSetting) -> Callable[[], bool]:
        self._graphs = DraftGraphs(self, setting)
        return self._graphs.capture_one_more

    @property
    def drawn_from(self) -> DrawnFrom | None:
        return None if self.draft_logits is None else DrawnFrom(self.draft_logits, self.draft_columns)

    def propose(self, batch: DraftBatch, noise: bool) -> Tensor:
        self.choose_first(batch, self.forward(self.first_ids(batch), self.first_context(batch)), noise)
        return self.finish(batch, noise)

    def run(self, batch: DraftBatch, noise: bool) -> Tensor:
        return self.propose(batch, noise) if self._graphs is None else self._graphs.run(batch, noise)

    def choose_first(self, batch: DraftBatch, hidden: Tensor, noise: bool) -> None:
        self._choose(batch, 0, self._chosen(hidden, self._last_indices[: batch.padded_reqs]), noise)

    def finish(self, batch: DraftBatch, noise: bool) -> Tensor:
        """All drafts but the first, a pass each."""
        num_reqs = batch.padded_reqs
        drafts = self._draft_ids[:num_reqs, : batch.num_drafts]
        starts = np.arange(batch.num_reqs + 1, dtype=np.int32)
        inputs = NextPassInputs(
            tokens=self._tokens(num_reqs),
            query_lens=self._query_lens[:num_reqs],
            seq_lens=self._seq_lens[:num_reqs],
            draft_positions=self._draft_positions[:num_reqs],
        )
        left = None
        for idx in range(1, batch.num_drafts):
            last_draft = drafts[:, idx - 1]
            prepare_next_pass(self._rows, batch.rows, idx, last_draft, self._page_size, self.slots_before, inputs)
            # The bound moves on with the device's lengths.
            bounds = np.minimum(batch.seq_lens_bound + idx, self._max_len)
            context = self._context(batch, num_reqs, self._one_each[: num_reqs + 1], starts, 1, bounds)
            left = self._chosen(self._next(idx, batch.num_drafts, inputs.tokens.input_ids, left, context))
            self._choose(batch, idx, left, noise)
        return drafts

    def _choose(self, batch: DraftBatch, idx: int, hidden: Tensor, noise: bool) -> None:
        """Draw one draft a request: at its temperature, without the parameters that the target looks after."""
        rows, num_reqs = self._rows, batch.padded_reqs
        logits = self._logits(idx, hidden)
        keys = DrawKeys(rows.temperature, rows.seeds, self._draft_positions[:num_reqs], rows.choice)
        kept = None if self.draft_logits is None else self.draft_logits[:, idx]
        drawn = DrawnDrafts(self._draft_ids[:num_reqs, idx], kept)
        draw_drafts(logits, batch.rows, keys, noise, self._purpose, self._target_ids, drawn)

    def _context(
        self, batch: DraftBatch, num_tokens: int, starts: Tensor, starts_cpu: Int32s, query_len: int, bounds: Int32s
    ) -> AttentionContext:
        """The attention of a pass over the drafter's own inputs."""
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
            seq_starts=self._seq_starts[:num_reqs],
        )
        return self.caches.begin(StepTokens(self._positions[:num_tokens], slot_mapping, common))
