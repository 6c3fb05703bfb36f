"""The per-step input buffers of a forward pass, at fixed addresses, filled on the device from the request rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.config import EngineConfig
from slipstream.graphs.descriptor import BatchExecutionDescriptor
from slipstream.kernels.prepare_inputs import BatchLayout, StepInputs, TokenInputs, prepare_inputs
from slipstream.runner.recent import Recent
from slipstream.runner.request_state import RequestRows
from slipstream.runner.staging import Int32s
from slipstream.sampling.operation import Positions
from slipstream.speculate.speculator import DraftBatch, TargetPass, largest_lengths
from slipstream.speculate.verify import Drafted
from slipstream.types import Composition, StepPlan

_FAR_APART = 7919  # tokens one behind the other, where all are to be different; a prime


@dataclass(frozen=True, slots=True)
class InputBatch:
    """One step's inputs: device tensors cut to the padded size, and what the host knows of them."""

    input_ids: Tensor  # [padded_tokens] int32
    positions: Tensor  # [padded_tokens] int64
    batch_rows: Tensor  # [padded_reqs] int32
    logit_indices: Tensor  # [padded_logits] int64: tokens whose logits are wanted
    drafted: Drafted  # whose logits those are, and which drafts they are to be compared with
    attention: CommonAttentionMetadata
    drafting: DraftBatch
    # Tokens of every request, where all of them are one known token and as many drafts.
    decode_len: int | None

    @property
    def layout(self) -> BatchLayout:
        return BatchLayout(self.batch_rows, self.attention.query_start_loc, self.drafted.logit_start_loc)


class _StagedBatch(NamedTuple):
    """A batch for all steps with one composition."""

    composition: Composition
    batch: InputBatch
    columns: Int32s  # what the device is told of it: rows, and where their tokens and logits begin
    num_tokens: Int32s
    draft_bounds: Int32s | None  # the batch's, where the engine drafts

    def set_bounds(self, plan: StepPlan, max_model_len: int) -> None:
        """Lengths go on from step to step; a step's own are read while it is launched, and not later."""
        bounds, exact = self.batch.attention.seq_lens_cpu_upper_bound, self.batch.attention.num_computed_cpu
        if exact is not None:
            exact[:] = plan.num_computed_bounds
        np.add(plan.num_computed_bounds, self.num_tokens, out=bounds)
        if self.draft_bounds is not None:
            np.minimum(bounds + 1, max_model_len, out=self.draft_bounds)
        np.minimum(bounds, max_model_len, out=bounds)


class InputBuffers:
    def __init__(self, config: EngineConfig, rows: RequestRows) -> None:
        max_tokens, max_reqs = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
        place = rows.store.device
        self._page_size = config.cache.page_size
        self.max_model_len = config.scheduler.max_model_len
        self._vocab_size = config.model.vocab_size
        self._exact_lengths = config.scheduler.exact_lengths != "never"
        self._max_logits = 1 + config.num_drafts  # of a request
        self.max_num_logits = min(max_tokens, max_reqs * self._max_logits)
        self.input_ids = torch.zeros(max_tokens, dtype=torch.int32, device=place)
        self.positions = torch.zeros(max_tokens, dtype=torch.int64, device=place)
        self.slot_mapping = torch.zeros(max_tokens, dtype=torch.int64, device=place)
        self.query_lens = torch.zeros(max_reqs, dtype=torch.int32, device=place)
        self.seq_lens = torch.zeros(max_reqs, dtype=torch.int32, device=place)
        self.block_table = torch.zeros(max_reqs, rows.max_pages, dtype=torch.int32, device=place)
        self.logit_indices = torch.zeros(self.max_num_logits, dtype=torch.int64, device=place)
        self.logit_rows = torch.zeros(self.max_num_logits, dtype=torch.int32, device=place)
        self.logit_positions = torch.zeros(self.max_num_logits, dtype=torch.int32, device=place)
        self.logit_drafts = torch.zeros(self.max_num_logits, dtype=torch.int32, device=place)
        self.rows = rows
        self._staged: _StagedBatch | None = None  # that the device holds the composition of
        self._made: Recent[Composition, _StagedBatch] = Recent()
        self._one_each = np.arange(max_reqs + 1, dtype=np.int32)
        # What a step without drafts has for them; others are made from it.
        step = TargetPass(self._attention(0, 0, 0, _NOTHING, _NOTHING), self.positions, rows.query_start_loc, None)
        self.no_drafting = DraftBatch(rows.batch_rows, 0, rows.draft_start_loc, _NOTHING, 0, 0, _NOTHING, step)

    def of_a_step(self) -> tuple[Tensor, ...]:
        """What every step fills anew, up to its padded size. Debug runs poison it before."""
        tokens = (self.input_ids, self.positions, self.slot_mapping)
        requests = (self.query_lens, self.seq_lens, self.block_table)
        return (*tokens, *requests, self.logit_indices, self.logit_rows, self.logit_positions, self.logit_drafts)

    def stage(self, plan: StepPlan) -> InputBatch:
        """Send the batch's composition to the device. The batch that comes back has the plan's own size."""
        composition = plan.composition
        if self._staged is None or composition is not self._staged.composition:
            self._staged = self._made.get(composition) or self._made.put(composition, self._make(composition))
            self.rows.stage_batch(self._staged.columns)
        self.rows.flush()
        self._staged.set_bounds(plan, self.max_model_len)
        return self._staged.batch

    def _make(self, composition: Composition) -> _StagedBatch:
        """The bounds are missing."""
        num_reqs = composition.num_reqs
        batch_rows = np.array(composition.rows, dtype=np.int32)
        num_tokens = np.array(composition.num_tokens, dtype=np.int32)
        starts, bounds = _starts(num_tokens), np.empty_like(num_tokens)
        logit_starts, drafting = self._one_each[: num_reqs + 1], self.no_drafting
        columns: tuple[Int32s, ...] = (batch_rows, starts, logit_starts)
        num_drafts: Int32s | None = None
        if self._max_logits > 1:
            num_drafts = np.array(composition.num_drafts, dtype=np.int32)
            num_logits = num_drafts + 1
            logit_starts = _starts(num_logits)
            # The drafter goes over the known tokens and the new one.
            in_pass = num_tokens - num_logits + 2 + composition.num_caught_up
            pass_starts = _starts(in_pass)
            columns = (batch_rows, starts, logit_starts, pass_starts)
            drafting = DraftBatch(
                self.rows.batch_rows,
                num_reqs,
                self.rows.draft_start_loc,
                pass_starts,
                int(pass_starts[-1]),
                int(in_pass.max()),
                np.empty_like(num_tokens),
                drafting.step,
                composition.num_next_drafts,
                composition.num_caught_up,
            )
        longest = int(num_tokens.max())
        decode_len = longest if longest * num_reqs == starts[-1] == logit_starts[-1] else None
        size = (num_reqs, int(starts[-1]), int(logit_starts[-1]))
        exact = np.empty_like(num_tokens) if composition.lengths_are_exact else None
        batch = self._batch(*size, longest, starts, bounds, drafting, decode_len, exact)
        # Not for the drafter, whose step this is as well.
        common = replace(batch.attention, num_common_pages=composition.num_common_pages, num_drafts_cpu=num_drafts)
        batch = replace(batch, attention=common)
        draft_bounds = drafting.seq_lens_bound if self._max_logits > 1 else None
        return _StagedBatch(composition, batch, self.rows.batch_columns(*columns), num_tokens, draft_bounds)

    def stage_nothing(self) -> None:
        """Make the batch on the device one of padding alone, as it was before the first step."""
        self._staged = None
        nobody = np.zeros(0, dtype=np.int32)
        self.rows.stage_batch(self.rows.batch_columns(nobody, _NOTHING, _NOTHING, _NOTHING))
        self.rows.flush()

    def stage_nobody(self, num_reqs: int, query_len: int) -> None:
        """Make it a batch of so many requests, each of them the scratch row: a step that does nobody any harm."""
        self._staged = None
        starts, rows = self._one_each[: num_reqs + 1], np.full(num_reqs, self.rows.scratch_row, dtype=np.int32)
        self.rows.stage_batch(self.rows.batch_columns(rows, starts * query_len, starts * query_len, starts * 2))
        self.rows.flush()

    @contextmanager
    def padding_of_many_tokens(self) -> Iterator[None]:
        """For steps that are timed. A GPU has a limit to its power, and needs less for tokens that are all the same:
        it would seem faster than it is with texts. And such tokens all ask for the same experts.
        """
        tokens = self.rows.token_ids[self.rows.scratch_row]
        tokens.copy_(torch.arange(len(tokens), device=tokens.device) * _FAR_APART % self._vocab_size)
        try:
            yield
        finally:
            tokens.zero_()

    def pad(self, batch: InputBatch, desc: BatchExecutionDescriptor) -> InputBatch:
        """The same step over more memory; what lies behind the batch is padding. The host's numbers stay the step's."""
        common = batch.attention
        padded = self.static(desc)
        attention = replace(
            padded.attention,
            num_reqs=common.num_reqs,
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc_cpu=common.query_start_loc_cpu,
            seq_lens_cpu_upper_bound=common.seq_lens_cpu_upper_bound,
            num_computed_cpu=common.num_computed_cpu,
            num_drafts_cpu=common.num_drafts_cpu,
        )
        drafting = batch.drafting.of(batch.drafting.step._replace(attention=attention, positions=padded.positions))
        attention = replace(attention, num_common_pages=common.num_common_pages)
        return replace(padded, attention=attention, drafting=drafting, decode_len=batch.decode_len)

    def static(self, desc: BatchExecutionDescriptor) -> InputBatch:
        """A batch for a recording, which serves every step of its size."""
        num_reqs, num_tokens, query_len = desc.num_reqs, desc.num_tokens, desc.query_len
        starts, longest, bounds = largest_lengths(num_reqs, num_tokens, query_len, self.max_model_len)
        num_logits = num_tokens if query_len is not None else min(num_tokens, num_reqs * self._max_logits)
        drafting = self._static_drafting(num_reqs, num_tokens, query_len, desc.num_drafts)
        # Nobody's lengths are known for certain, in a recording and in a step that is only timed.
        exact = np.zeros(num_reqs, dtype=np.int32) if self._exact_lengths else None
        batch = self._batch(num_reqs, num_tokens, num_logits, longest, starts, bounds, drafting, query_len, exact)
        num_drafts = np.full(num_reqs, query_len - 1, dtype=np.int32) if query_len is not None else None
        return replace(batch, attention=replace(batch.attention, num_drafts_cpu=num_drafts))

    def _static_drafting(self, num_reqs: int, num_tokens: int, query_len: int | None, num_drafts: int) -> DraftBatch:
        """A request that decodes has two tokens in the drafter's first pass, any other at most one more than here."""
        first_len = None if query_len is None else 2
        num_tokens = num_tokens + num_reqs if first_len is None else first_len * num_reqs
        return self.no_drafting.static(num_reqs, num_tokens, first_len, self.max_model_len, num_drafts)

    def prepare(self, batch: InputBatch) -> None:
        """Queue the filling of the batch from the rows."""
        common, drafted = batch.attention, batch.drafted
        inputs = StepInputs(
            tokens=TokenInputs(batch.input_ids, batch.positions, common.slot_mapping),
            query_lens=common.query_lens,
            seq_lens=common.seq_lens,
            block_table=common.block_table,
            logit_indices=batch.logit_indices,
            logit_rows=drafted.at.rows,
            logit_positions=drafted.at.positions,
            logit_drafts=drafted.draft_ids,
        )
        prepare_inputs(self.rows.state, batch.layout, self._page_size, self._max_logits, inputs)

    def _attention(
        self,
        num_reqs: int,
        num_tokens: int,
        max_query_len: int,
        query_start_loc_cpu: Int32s,
        bounds: Int32s,
        exact: Int32s | None = None,
    ) -> CommonAttentionMetadata:
        return CommonAttentionMetadata(
            num_reqs=num_reqs,
            num_actual_tokens=num_tokens,
            max_query_len=max_query_len,
            query_start_loc=self.rows.query_start_loc[: num_reqs + 1],
            query_start_loc_cpu=query_start_loc_cpu,
            query_lens=self.query_lens[:num_reqs],
            seq_lens=self.seq_lens[:num_reqs],
            seq_lens_cpu_upper_bound=bounds,
            block_table=self.block_table[:num_reqs],
            slot_mapping=self.slot_mapping[:num_tokens],
            num_computed_cpu=exact,
            batch_rows=self.rows.batch_rows[:num_reqs],
        )

    def _batch(
        self,
        num_reqs: int,
        num_tokens: int,
        num_logits: int,
        max_query_len: int,
        query_start_loc_cpu: Int32s,
        bounds: Int32s,
        drafting: DraftBatch,
        decode_len: int | None,
        exact: Int32s | None,
    ) -> InputBatch:
        attention = self._attention(num_reqs, num_tokens, max_query_len, query_start_loc_cpu, bounds, exact)
        positions = self.positions[:num_tokens]
        if self._max_logits > 1:
            drafting = drafting.of(TargetPass(attention, positions, self.rows.query_start_loc, decode_len))
        at = Positions(self.logit_rows[:num_logits], self.logit_positions[:num_logits])
        return InputBatch(
            input_ids=self.input_ids[:num_tokens],
            positions=positions,
            batch_rows=self.rows.batch_rows[:num_reqs],
            logit_indices=self.logit_indices[:num_logits],
            drafted=Drafted(
                at,
                self.logit_drafts[:num_logits],
                self.rows.logit_start_loc[: num_reqs + 1],
                are_none=decode_len == 1,
            ),
            attention=attention,
            drafting=drafting,
            decode_len=decode_len,
        )


_NOTHING = np.zeros(1, dtype=np.int32)


def _starts(counts: Int32s) -> Int32s:
    """Where each begins, and where the last ends."""
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts
