"""Gaps in a drafter's cache: tokens that it missed, because no drafts were proposed after them.

The slots there hold keys of other requests, or none. The drafter's attention begins after the last gap. A drafter that
needs only tokens processes those it has missed, as far as its pass has room, and closes the gap.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import operation
from slipstream.kernels.native.step import batch_record, compiled, in_c, rows_record
from slipstream.kernels.request_rows import RowState
from slipstream.kernels.triton_jit import early_start, jit, let_next_start, runs_triton, tl, wait_for_last


@operation(writes=("rows.draft_start", "rows.draft_end", "seq_starts", "first_slots"))
def mark_gaps(
    batch_rows: Tensor,  # [padded_reqs] int32; padding names the scratch row, which never runs
    rows: RowState,  # after the step; written in part
    goes_over_all: bool,  # whether the drafter's pass processes all of the step's tokens, or only the last of them
    num_caught_up: int,  # if only the last: the pass has room for this many tokens before it
    seq_starts: Tensor,  # written: [padded_reqs] int32: draft_start of the batch
    first_slots: Tensor,  # written: [padded_reqs] int32: first slot of a pass that closes a gap; -1: the step's own
) -> None:
    """A step that begins where the last drafting step ended leaves no gap."""
    if runs_triton(batch_rows):
        _gaps_kernel[(batch_rows.shape[0],)](
            batch_rows,
            rows.num_computed,
            rows.step_start,
            rows.draft_start,
            rows.draft_end,
            seq_starts,
            first_slots,
            num_caught_up,
            ALL=goes_over_all,
            num_warps=1,
            **early_start(batch_rows),
        )
        return
    own = batch_rows.long()
    first = rows.step_start[own] - 1
    computed, end, runs = rows.num_computed[own], rows.draft_end[own], first >= 0
    gap = runs & (first > end)
    if not goes_over_all:
        first = torch.maximum(end, computed - 1 - num_caught_up)
    starts = torch.where(gap & (first > end), first, rows.draft_start[own])
    rows.draft_start[own] = starts
    rows.draft_end[own] = torch.where(runs, computed, end)
    seq_starts.copy_(starts)
    first_slots.copy_(torch.where(gap, first, -1))


@in_c(mark_gaps)
def _mark_in_c(
    batch_rows: Tensor,
    rows: RowState,
    goes_over_all: bool,
    num_caught_up: int,
    seq_starts: Tensor,
    first_slots: Tensor,
) -> None:
    slots = (seq_starts.data_ptr(), first_slots.data_ptr())
    compiled().slip_mark_gaps(rows_record(rows), batch_record(batch_rows), goes_over_all, num_caught_up, *slots)


@jit
def _gaps_kernel(
    batch_rows,
    num_computed,
    step_start,
    draft_start,
    draft_end,
    seq_starts,
    first_slots,
    num_caught_up,
    ALL: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per request. Padding shares the scratch row, which does not run and is not written."""
    wait_for_last(EARLY)
    let_next_start(EARLY)
    i = tl.program_id(0)
    row = tl.load(batch_rows + i).to(tl.int64)
    first = tl.load(step_start + row) - 1
    computed, start, end = tl.load(num_computed + row), tl.load(draft_start + row), tl.load(draft_end + row)
    runs = first >= 0
    gap = runs & (first > end)
    if not ALL:
        first = tl.maximum(end, computed - 1 - num_caught_up)
    start = tl.where(gap & (first > end), first, start)
    tl.store(draft_start + row, start, mask=gap)
    tl.store(draft_end + row, computed, mask=runs)
    tl.store(seq_starts + i, start)
    tl.store(first_slots + i, tl.where(gap, first, -1))
