"""Inputs of a draft model's passes after the first, made on the device: one draft a request each."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.device.operation import operation
from slipstream.kernels.native.step import PassInputsRecord, batch_record, compiled, in_c, record, rows_record
from slipstream.kernels.request_rows import RowState
from slipstream.kernels.step.prepare_inputs import TokenInputs, tokens_record
from slipstream.kernels.triton_jit import early_start, jit, let_next_start, runs_triton, tl, wait_for_last
from slipstream.plan import RowStatus


class NextPassInputs(NamedTuple):
    """The inputs of a later pass: one token per request."""

    tokens: TokenInputs
    query_lens: Tensor  # [padded_reqs] int32: 1 or 0
    seq_lens: Tensor  # [padded_reqs] int32
    draft_positions: Tensor  # [padded_reqs] int32


@operation(writes=("inputs",))
def prepare_next_pass(
    rows: RowState,
    batch_rows: Tensor,  # [padded_reqs] int32
    idx: int,  # the draft of this pass
    last_draft: Tensor,  # [padded_reqs] int32: the draft before, -1 if there is none
    page_size: int,
    slots_before: int,  # distance from the draft's slot back to its keys
    inputs: NextPassInputs,  # written
) -> None:
    """A request takes part while the draft could be useful."""
    if runs_triton(batch_rows):
        _launch_next_pass(rows, batch_rows, idx, last_draft, page_size, slots_before, inputs)
        return
    own, tokens = batch_rows.long(), inputs.tokens
    length = rows.num_tokens[own]
    runs = (rows.status[own] == RowStatus.RUNNING) & (rows.num_computed[own] + 1 == length) & (last_draft >= 0)
    runs &= (idx < rows.max_drafts[own]) & (idx < rows.max_total[own] - length - 1)
    position = torch.where(runs, length + idx - 1 - slots_before, 0).long()
    page_id = rows.page_table[own, position // page_size].long()
    tokens.input_ids.copy_(torch.where(runs, last_draft, 0))
    tokens.positions.copy_(position)
    tokens.slot_mapping.copy_(torch.where(runs, page_id * page_size + position % page_size, -1))
    inputs.query_lens.copy_(runs)
    inputs.seq_lens.copy_(torch.where(runs, position + 1, 0))
    inputs.draft_positions.copy_(length + idx)


@in_c(prepare_next_pass)
def _prepare_in_c(
    rows: RowState,
    batch_rows: Tensor,
    idx: int,
    last_draft: Tensor,
    page_size: int,
    slots_before: int,
    inputs: NextPassInputs,
) -> None:
    out = record(PassInputsRecord, *inputs[1:], None, None, page_size, 0)
    last = (last_draft.data_ptr(), last_draft.stride(0))
    shared = (rows_record(rows), batch_record(batch_rows))
    compiled().slip_prepare_next_pass(*shared, idx, *last, slots_before, tokens_record(inputs.tokens), out)


def _launch_next_pass(
    rows: RowState,
    batch_rows: Tensor,
    idx: int,
    last_draft: Tensor,
    page_size: int,
    slots_before: int,
    inputs: NextPassInputs,
) -> None:
    _next_pass_kernel[(batch_rows.shape[0],)](
        last_draft,
        idx,
        batch_rows,
        rows.page_table,
        rows.num_computed,
        rows.num_tokens,
        rows.max_drafts,
        rows.max_total,
        rows.status,
        inputs.tokens.input_ids,
        inputs.tokens.positions,
        inputs.tokens.slot_mapping,
        inputs.query_lens,
        inputs.seq_lens,
        inputs.draft_positions,
        last_draft.stride(0),
        rows.page_table.stride(0),
        page_size,
        slots_before,
        RUNNING=int(RowStatus.RUNNING),
        num_warps=1,
        **early_start(batch_rows),
    )


@jit
def _next_pass_kernel(
    before_ids,
    idx,
    batch_rows,
    page_table,
    num_computed,
    num_tokens,
    max_drafts,
    max_total,
    status,
    input_ids,
    positions,
    slot_mapping,
    query_lens,
    seq_lens,
    draft_positions,
    stride,
    max_pages,
    page_size,
    slots_before,
    RUNNING: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_last(EARLY)
    let_next_start(EARLY)
    i = tl.program_id(0)
    row = tl.load(batch_rows + i).to(tl.int64)
    length = tl.load(num_tokens + row)
    before = tl.load(before_ids + i.to(tl.int64) * stride)
    runs = (tl.load(status + row) == RUNNING) & (tl.load(num_computed + row) + 1 == length) & (before >= 0)
    runs = runs & (idx < tl.load(max_drafts + row)) & (idx < tl.load(max_total + row) - length - 1)
    position = tl.where(runs, length + idx - 1 - slots_before, 0)
    page = tl.load(page_table + row * max_pages + position // page_size).to(tl.int64)
    tl.store(input_ids + i, tl.where(runs, before, 0))
    tl.store(positions + i, position.to(tl.int64))
    tl.store(slot_mapping + i, tl.where(runs, page * page_size + position % page_size, -1))
    tl.store(query_lens + i, runs.to(tl.int32))
    tl.store(seq_lens + i, tl.where(runs, position + 1, 0))
    tl.store(draft_positions + i, length + idx)
