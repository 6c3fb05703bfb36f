"""The input buffers of a forward pass, at fixed addresses, filled on the device from the request rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.config import EngineConfig
from slipstream.device.launches import watch
from slipstream.graphs.descriptor import BatchExecutionDescriptor
from slipstream.kernels.step.prepare_inputs import BatchLayout, StepInputs, TokenInputs, prepare_inputs
from slipstream.plan import Composition
from slipstream.runner.request_state import RequestRows
from slipstream.runner.staging import Int32s
from slipstream.sampling.operation import Positions
from slipstream.speculate.speculator import DraftBatch, TargetPass, largest_lengths
from slipstream.speculate.verify import Drafted


@dataclass(frozen=True, slots=True)
class InputBatch:
    """One step's inputs: device tensors with padded sizes, and the host's numbers."""

    input_ids: Tensor  # [padded_tokens] int32
    positions: Tensor  # [padded_tokens] int64
    batch_rows: Tensor  # [padded_reqs] int32
    logit_indices: Tensor  # [padded_logits] int64: tokens whose logits are computed
    drafted: Drafted  # the rows of those logits, and the drafts to compare them with
    attention: CommonAttentionMetadata
    drafting: DraftBatch
    # Query tokens of every request, if each has one known token and equally many drafts.
    decode_len: int | None

    @property
    def layout(self) -> BatchLayout:
        return BatchLayout(self.batch_rows, self.attention.query_start_loc, self.drafted.logit_start_loc)

    def watched(self) -> InputBatch:
        """The same batch, for a recording of its launches, which must not depend on the host's lengths."""
        drafting, exact = self.drafting, self.attention.num_computed_cpu
        bounds = watch(self.attention.seq_lens_cpu_upper_bound)
        exact = None if exact is None else watch(exact)
        attention = replace(self.attention, seq_lens_cpu_upper_bound=bounds, num_computed_cpu=exact)
        before = replace(drafting.step.attention, seq_lens_cpu_upper_bound=bounds, num_computed_cpu=exact)
        step = drafting.step._replace(attention=before)
        drafting = replace(drafting, seq_lens_bound=watch(drafting.seq_lens_bound), step=step)
        return replace(self, attention=attention, drafting=drafting)


class BatchShape(NamedTuple):
    """Sizes of a batch, and the host's knowledge of its requests' lengths."""

    num_reqs: int
    num_tokens: int
    num_logits: int
    max_query_len: int
    starts: Int32s  # [num_reqs + 1]: first token of each request, and the end of the last one's
    bounds: Int32s  # [num_reqs]: upper bound of each request's tokens after the step
    exact: Int32s | None = None  # [num_reqs]: computed tokens before the step, if attention needs exact lengths
    decode_len: int | None = None  # query tokens of every request, if each has one known token and drafts


class InputBuffers:
    def __init__(self, config: EngineConfig, rows: RequestRows) -> None:
        max_tokens, max_reqs = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
        device = rows.store.device
        self._page_size = config.cache.page_size
        self.max_model_len = config.scheduler.max_model_len
        self._exact_lengths = config.scheduler.exact_lengths != "never"
        self._max_logits = 1 + config.num_drafts  # of one request
        self.max_num_logits = min(max_tokens, max_reqs * self._max_logits)
        self.input_ids = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self.positions = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self.slot_mapping = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self.query_lens = torch.zeros(max_reqs, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(max_reqs, dtype=torch.int32, device=device)
        self.block_table = torch.zeros(max_reqs, rows.max_pages, dtype=torch.int32, device=device)
        self.logit_indices = torch.zeros(self.max_num_logits, dtype=torch.int64, device=device)
        self.logit_rows = torch.zeros(self.max_num_logits, dtype=torch.int32, device=device)
        self.logit_positions = torch.zeros(self.max_num_logits, dtype=torch.int32, device=device)
        self.logit_drafts = torch.zeros(self.max_num_logits, dtype=torch.int32, device=device)
        self.rows = rows
        self._one_each = np.arange(max_reqs + 1, dtype=np.int32)
        # The drafted logits of a step without drafts; those of others are derived from it.
        empty = BatchShape(0, 0, 0, 0, _NOTHING, _NOTHING)
        step = TargetPass(self._attention(empty), self.positions, rows.query_start_loc, None)
        self.no_drafting = DraftBatch(rows.batch_rows, 0, rows.draft_start_loc, _NOTHING, 0, 0, _NOTHING, step)

    def step_buffers(self) -> tuple[Tensor, ...]:
        """Memory that every step fills, up to its padded size. Debug runs poison it before."""
        tokens = (self.input_ids, self.positions, self.slot_mapping)
        requests = (self.query_lens, self.seq_lens, self.block_table)
        return (*tokens, *requests, self.logit_indices, self.logit_rows, self.logit_positions, self.logit_drafts)

    def offsets(self, composition: Composition) -> tuple[Int32s, ...]:
        """The first token and the first logit of each request; if the engine drafts, of the drafter's first pass too.

        [num_reqs + 1] each: the last value is the end of the last request's.
        """
        num_tokens = np.array(composition.num_tokens, dtype=np.int32)
        if self._max_logits == 1:
            return _starts(num_tokens), self._one_each[: composition.num_reqs + 1]
        num_logits = np.array(composition.num_drafts, dtype=np.int32) + 1
        # The drafter processes the known tokens and the new one.
        in_pass = num_tokens - num_logits + 2 + composition.num_caught_up
        return _starts(num_tokens), _starts(num_logits), _starts(in_pass)

    def batch(self, composition: Composition, offsets: tuple[Int32s, ...]) -> InputBatch:
        """Inputs of the composition's own size, without the requests' lengths, which change from step to step."""
        num_reqs, num_tokens = composition.num_reqs, np.array(composition.num_tokens, dtype=np.int32)
        starts, logit_starts, *pass_starts = offsets
        longest, num_drafts, drafting = int(num_tokens.max()), None, self.no_drafting
        if pass_starts:
            num_drafts = np.array(composition.num_drafts, dtype=np.int32)
            drafting = replace(
                drafting,
                padded_reqs=num_reqs,
                start_loc_cpu=pass_starts[0],
                num_tokens=int(pass_starts[0][-1]),
                max_query_len=int(np.diff(pass_starts[0]).max()),
                seq_lens_bound=np.empty_like(num_tokens),
                num_drafts=composition.num_next_drafts,
                num_caught_up=composition.num_caught_up,
            )
        shape = BatchShape(
            num_reqs,
            num_tokens=int(starts[-1]),
            num_logits=int(logit_starts[-1]),
            max_query_len=longest,
            starts=starts,
            bounds=np.empty_like(num_tokens),
            exact=np.empty_like(num_tokens) if composition.lengths_are_exact else None,
            decode_len=longest if longest * num_reqs == starts[-1] == logit_starts[-1] else None,
        )
        batch = self._batch(shape, drafting)
        # Not for the drafter, which uses the same attention inputs.
        common = replace(
            batch.attention,
            num_common_pages=composition.num_common_pages,
            num_drafts_cpu=num_drafts,
            num_decodes=_count_decodes(composition),
        )
        return replace(batch, attention=common)

    def pad(self, batch: InputBatch, desc: BatchExecutionDescriptor) -> InputBatch:
        """The same step with padding. The host's numbers stay the step's own."""
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
        step = batch.drafting.step._replace(attention=attention, positions=padded.positions)
        drafting = batch.drafting.with_target(step)
        attention = replace(attention, num_common_pages=common.num_common_pages, num_decodes=common.num_decodes)
        return replace(padded, attention=attention, drafting=drafting, decode_len=batch.decode_len)

    def static(self, desc: BatchExecutionDescriptor) -> InputBatch:
        """A batch for a capture, which serves every step of its size."""
        num_reqs, num_tokens, query_len = desc.num_reqs, desc.num_tokens, desc.query_len
        starts, longest, bounds = largest_lengths(num_reqs, num_tokens, query_len, self.max_model_len)
        num_logits = num_tokens if query_len is not None else min(num_tokens, num_reqs * self._max_logits)
        # A captured or timed step has no exact lengths.
        exact = np.zeros(num_reqs, dtype=np.int32) if self._exact_lengths else None
        shape = BatchShape(num_reqs, num_tokens, num_logits, longest, starts, bounds, exact, query_len)
        batch = self._batch(shape, self._static_drafting(num_reqs, num_tokens, query_len, desc.num_drafts))
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

    def _attention(self, shape: BatchShape) -> CommonAttentionMetadata:
        num_reqs = shape.num_reqs
        return CommonAttentionMetadata(
            num_reqs=num_reqs,
            num_actual_tokens=shape.num_tokens,
            max_query_len=shape.max_query_len,
            query_start_loc=self.rows.query_start_loc[: num_reqs + 1],
            query_start_loc_cpu=shape.starts,
            query_lens=self.query_lens[:num_reqs],
            seq_lens=self.seq_lens[:num_reqs],
            seq_lens_cpu_upper_bound=shape.bounds,
            block_table=self.block_table[:num_reqs],
            slot_mapping=self.slot_mapping[: shape.num_tokens],
            num_computed_cpu=shape.exact,
            batch_rows=self.rows.batch_rows[:num_reqs],
            encoder=self.rows.encoder,
        )

    def _batch(self, shape: BatchShape, drafting: DraftBatch) -> InputBatch:
        num_reqs, num_tokens, num_logits = shape.num_reqs, shape.num_tokens, shape.num_logits
        attention, positions = self._attention(shape), self.positions[:num_tokens]
        if self._max_logits > 1:
            step = TargetPass(attention, positions, self.rows.query_start_loc, shape.decode_len)
            drafting = drafting.with_target(step)
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
                are_none=shape.decode_len == 1,
            ),
            attention=attention,
            drafting=drafting,
            decode_len=shape.decode_len,
        )


_NOTHING = np.zeros(1, dtype=np.int32)  # offsets of a batch without requests


def _count_decodes(composition: Composition) -> int:
    """Leading requests that decode, as many as have the first one's number of tokens."""
    query_len, count = composition.num_tokens[0], 0
    for num_tokens, samples, num_drafts in zip(
        composition.num_tokens, composition.samples, composition.num_drafts, strict=True
    ):
        if not samples or num_tokens != query_len or num_tokens != 1 + num_drafts:
            break
        count += 1
    return count


def _starts(counts: Int32s) -> Int32s:
    """First index of each, and the end of the last."""
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts
