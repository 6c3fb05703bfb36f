"""Drafting token by token with a network that has its own keys: the loop, its inputs, its graphs.

A method defines the tokens of its first pass, and how a pass turns tokens into hidden states. The first pass gives the
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
from slipstream.kernels.request_rows import RowState
from slipstream.kernels.step.prepare_inputs import TokenInputs
from slipstream.models.source_encoder import SourceEncoder
from slipstream.sampling.draw import DrawKeys, DrawnDrafts, draw_drafts
from slipstream.sampling.gumbel import TARGET_NOISE
from slipstream.speculate.draft_gaps import mark_gaps
from slipstream.speculate.draft_graphs import DraftGraphs, FirstSize
from slipstream.speculate.next_pass_inputs import NextPassInputs, prepare_next_pass
from slipstream.speculate.rejection import DRAFT_NOISE, DrawnFrom
from slipstream.speculate.speculator import DraftBatch, Follower, GraphSetting, Int32s, TargetAttention


class AutoRegressiveSpeculator(ABC):
    # How many slots before a token's own slot its keys are: 1 if a token is paired with the hidden state before it.
    slots_before: ClassVar[int] = 0
    shares_states: bool = False
    has_gaps: ClassVar[bool] = True  # steps without proposals leave slots without its keys
    encoder: SourceEncoder | None = None  # of its own
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
        device_, max_reqs = device.torch_device, config.scheduler.max_num_seqs
        self._dtype = getattr(torch, config.dtype)
        # A first pass may have one token more per request than the target's.
        max_tokens = config.scheduler.max_num_batched_tokens + max_reqs
        self._input_ids = torch.zeros(max_tokens, dtype=torch.int32, device=device_)
        self._positions = torch.zeros(max_tokens, dtype=torch.int64, device=device_)
        self._slot_mapping = torch.zeros(max_tokens, dtype=torch.int64, device=device_)
        self._query_lens = torch.zeros(max_reqs, dtype=torch.int32, device=device_)
        self._seq_lens = torch.zeros(max_reqs, dtype=torch.int32, device=device_)
        self._last_indices = torch.zeros(max_reqs, dtype=torch.int64, device=device_)
        self._draft_positions = torch.zeros(max_reqs, dtype=torch.int32, device=device_)
        self._draft_ids = torch.zeros(max_reqs, self.num_drafts, dtype=torch.int32, device=device_)
        self._block_table = torch.zeros(max_reqs, rows.page_table.shape[1], dtype=torch.int32, device=device_)
        self._seq_starts = torch.zeros(max_reqs, dtype=torch.int32, device=device_)
        self._first_slots = torch.zeros(max_reqs, dtype=torch.int32, device=device_)
        self._one_each = torch.arange(max_reqs + 1, dtype=torch.int32, device=device_)
        self._graphs: DraftGraphs | None = None
        self._purpose = DRAFT_NOISE if speculative.verify == "rejection" else TARGET_NOISE
        # Speculative sampling compares the two models' distributions, so the drafts' logits are kept, by row.
        self.draft_logits: Tensor | None = None
        if speculative.verify == "rejection":
            shape = (rows.num_tokens.shape[0], self.num_drafts, self._num_columns(config))
            self.draft_logits = torch.zeros(shape, dtype=torch.float32, device=device_)

    # --- defined by a method ----------------------------------------------------------------------

    @abstractmethod
    def _num_columns(self, config: EngineConfig) -> int:
        """Size of the vocabulary that drafts are sampled from."""

    @abstractmethod
    def first_size(self, batch: DraftBatch) -> FirstSize:
        """Numbers of tokens of the first pass."""

    @abstractmethod
    def first_query_lens(self, lengths: Sequence[int]) -> Sequence[int]:
        """Tokens of a decoding request in the first pass, for each draft length."""

    def rest_lengths(self, lengths: Sequence[int]) -> Sequence[int]:
        """Draft lengths with passes after the first."""
        return [length for length in lengths if length > 1]

    @abstractmethod
    def static_batch(self, desc: BatchExecutionDescriptor, setting: GraphSetting) -> DraftBatch:
        """A batch for the capture of a first pass."""

    @abstractmethod
    def first_ids(self, batch: DraftBatch) -> Tensor:
        """Queue the inputs of the first pass, and return its tokens."""

    @abstractmethod
    def first_context(self, batch: DraftBatch, target: TargetAttention | None = None) -> AttentionContext:
        """The caches of the first pass; ``target`` is what the target's pass has built, if it can be reused."""

    @abstractmethod
    def forward(self, input_ids: Tensor, context: AttentionContext) -> Tensor:
        """The first pass: [padded_tokens, hidden]."""

    @abstractmethod
    def _next(
        self, idx: int, num_drafts: int, input_ids: Tensor, left: Tensor | None, context: AttentionContext
    ) -> Tensor:
        """A later pass, for draft ``idx`` of the total: [padded_reqs, hidden].

        The hidden state of the pass before comes along; None if that was the first pass.
        """

    @abstractmethod
    def _logits(self, idx: int, hidden: Tensor) -> Tensor:
        """Logits of draft ``idx``: [n, hidden] -> [n, columns]."""

    def _select(self, hidden: Tensor, indices: Tensor | None = None) -> Tensor:
        """The hidden states that drafts are sampled from: all of a pass, or of a first pass those at ``indices``.

        A method that needs the latter again must keep it: the later passes may be another graph.
        """
        return hidden if indices is None else hidden.index_select(0, indices)

    def encode(self, features: Tensor, page_ids: Tensor) -> None:
        if self.encoder is not None:
            for layer in self.encoder.encode(features):
                self.caches.store_encoded(*layer, page_ids)

    def taps(self, num_tokens: int) -> Mapping[int, Tensor]:
        return {}

    @property
    def _target_ids(self) -> Tensor | None:
        """The target's tokens of the columns that drafts are sampled from; None if they are the first ones."""
        return None

    # --- common to all methods --------------------------------------------------------------------

    def _find_gaps(self, batch: DraftBatch) -> None:
        """After a step without drafts, its tokens have no keys here: attention begins after them.

        Unless this pass processes them.
        """
        # A pass in the target's shape has the target's padding, whatever the drafts' padding is.
        num_reqs = max(batch.padded_reqs, batch.step.attention.seq_lens.shape[0])
        slots = (self._seq_starts[:num_reqs], self._first_slots[:num_reqs])
        mark_gaps(batch.all_rows[:num_reqs], self._rows, self.shares_states, batch.num_caught_up, *slots)

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
        self._choose(batch, 0, self._select(hidden, self._last_indices[: batch.padded_reqs]), noise)

    def finish(self, batch: DraftBatch, noise: bool) -> Tensor:
        """All drafts but the first, one pass each."""
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
            # The host's bound advances with the device's lengths.
            bounds = np.minimum(batch.seq_lens_bound + idx, self._max_len)
            context = self.context(batch, num_reqs, self._one_each[: num_reqs + 1], starts, 1, bounds)
            left = self._select(self._next(idx, batch.num_drafts, inputs.tokens.input_ids, left, context))
            self._choose(batch, idx, left, noise)
        return drafts

    def _choose(self, batch: DraftBatch, idx: int, hidden: Tensor, noise: bool) -> None:
        """Sample one draft per request at its temperature; other sampling parameters are applied by the target."""
        rows, num_reqs = self._rows, batch.padded_reqs
        logits = self._logits(idx, hidden)
        keys = DrawKeys(rows.temperature, rows.seeds, self._draft_positions[:num_reqs], rows.choice)
        kept = None if self.draft_logits is None else self.draft_logits[:, idx]
        drawn = DrawnDrafts(self._draft_ids[:num_reqs, idx], kept)
        draw_drafts(logits, batch.rows, keys, noise, self._purpose, self._target_ids, drawn)

    def context(
        self, batch: DraftBatch, num_tokens: int, starts: Tensor, starts_cpu: Int32s, query_len: int, bounds: Int32s
    ) -> AttentionContext:
        """The attention context of a pass over the drafter's own inputs."""
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
            seq_starts=self._seq_starts[:num_reqs] if self.has_gaps else None,
            batch_rows=batch.rows,
            encoder=batch.step.attention.encoder,
        )
        return self.caches.begin(StepTokens(self._positions[:num_tokens], slot_mapping, common))
