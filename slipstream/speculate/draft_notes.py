"""Notes of steps after which a head proposes nothing: the inputs it would have processed, for many steps at once.

A head that processes every step reads its weights in every step. With notes it reads them once in a while: when the
notes are full, or before the next step that reads the head's keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.device.operation import operation
from slipstream.kernels.request_rows import RowState
from slipstream.kernels.triton_jit import (
    early_start,
    jit,
    let_next_start,
    next_power_of_2,
    runs_triton,
    tl,
    wait_for_last,
)
from slipstream.speculate.methods.heads import NUM_NOTED_STEPS


class DraftNotes:
    """Memory for a number of steps of each request, and for those of padding."""

    def __init__(self, max_reqs: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        # One more step, which is never read, is written after the last.
        size = (NUM_NOTED_STEPS + 1) * max_reqs
        self._first = torch.full((max_reqs,), -1, dtype=torch.int32, device=device)
        self.input_ids = torch.zeros(size, dtype=torch.int32, device=device)
        self.positions = torch.zeros(size, dtype=torch.int64, device=device)
        self.slots = torch.full((size,), -1, dtype=torch.int64, device=device)
        self.features = torch.zeros(size, width, dtype=dtype, device=device)

    def clear(self) -> None:
        self._first.fill_(-1)
        self.slots.fill_(-1)

    def add(self, batch_rows: Tensor, rows: RowState, step: NotedStep) -> None:
        notes = Notes(self._first[: len(batch_rows)], self.input_ids, self.positions, self.slots, self.features)
        write_notes(batch_rows, rows, step, NUM_NOTED_STEPS, notes)


class NotedStep(NamedTuple):
    """A step's tokens, one per request."""

    positions: Tensor  # [n] int64
    slots: Tensor  # [n] int64; -1 for padding
    features: Tensor  # [n, width]


class Notes(NamedTuple):
    """Notes of several steps: [step, n], one step after another."""

    first: Tensor  # [n] int32: the position of a request's first note; -1: it has none
    noted_ids: Tensor  # the token after the step's
    noted_positions: Tensor
    noted_slots: Tensor
    noted_features: Tensor


@operation(writes=("rows.draft_start", "rows.draft_end", "notes"))
def write_notes(
    batch_rows: Tensor,  # [n] int32; padding names the scratch row, which never runs
    rows: RowState,  # after the step; written: up to where they have the drafter's keys, or notes
    step: NotedStep,
    most: int,  # steps
    notes: Notes,  # written
) -> None:
    """From one step to the next a request advances by one: its position gives the index of the note."""
    n = step.features.shape[0]
    if runs_triton(step.features):
        _launch(batch_rows, rows, step, most, notes)
        return
    own, (positions, slots, features) = batch_rows.long(), step
    begun, runs = rows.step_start[own] - 1, rows.step_start[own] > 0
    rows.draft_start[own] = torch.where(runs & (begun > rows.draft_end[own]), begun, rows.draft_start[own])
    rows.draft_end[own] = torch.where(runs, rows.num_computed[own], rows.draft_end[own])
    noted = slots >= 0
    notes.first.copy_(torch.where(noted & (notes.first < 0), positions.int(), notes.first))
    indices = ((positions - notes.first).clamp(0, most) * n + torch.arange(n))[noted]
    is_known = runs & (positions + 1 < rows.num_tokens[own])
    next_ids = torch.where(is_known, rows.token_ids[own, torch.where(is_known, positions + 1, 0)], 0)
    notes.noted_ids[indices], notes.noted_positions[indices] = next_ids[noted], positions[noted]
    notes.noted_slots[indices], notes.noted_features[indices] = slots[noted], features[noted]


def _launch(batch_rows: Tensor, rows: RowState, step: NotedStep, most: int, notes: Notes) -> None:
    n, width = step.features.shape
    assert step.features.is_contiguous() and notes.noted_features.is_contiguous()
    block = min(4096, next_power_of_2(width))
    _notes_kernel[(n, -(-width // block))](
        batch_rows,
        rows.token_ids,
        rows.num_computed,
        rows.num_tokens,
        rows.step_start,
        step.positions,
        step.slots,
        step.features,
        most,
        notes.first,
        rows.draft_start,
        rows.draft_end,
        notes.noted_ids,
        notes.noted_positions,
        notes.noted_slots,
        notes.noted_features,
        n,
        rows.token_ids.stride(0),
        width,
        BLOCK=block,
        num_warps=max(1, block // 512),
        **early_start(step.features),
    )


@jit
def _notes_kernel(
    batch_rows,
    token_ids,
    num_computed,
    num_tokens,
    step_start,
    positions,
    slots,
    features,
    most,
    first,
    draft_start,
    draft_end,
    noted_ids,
    noted_positions,
    noted_slots,
    noted_features,
    n,
    max_len,
    width,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_last(EARLY)
    let_next_start(EARLY)
    i, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(batch_rows + i).to(tl.int64)
    position, slot, begin = tl.load(positions + i), tl.load(slots + i), tl.load(first + i)
    is_noted = slot >= 0
    # If another program has not yet written the first position, this is the first note.
    step = tl.where(begin < 0, 0, tl.minimum(tl.maximum(position - begin, 0), most))
    idx = step * n + i
    if part == 0:
        begun = tl.load(step_start + row) - 1
        runs = begun >= 0
        computed, end = tl.load(num_computed + row), tl.load(draft_end + row)
        tl.store(draft_start + row, begun, mask=runs & (begun > end))
        tl.store(draft_end + row, computed, mask=runs)
        tl.store(first + i, position.to(tl.int32), mask=is_noted & (begin < 0))
        is_known = runs & (position + 1 < tl.load(num_tokens + row))
        next_id = tl.load(token_ids + row * max_len + position + 1, mask=is_known, other=0)
        tl.store(noted_ids + idx, next_id, mask=is_noted)
        tl.store(noted_positions + idx, position, mask=is_noted)
        tl.store(noted_slots + idx, slot, mask=is_noted)
    column = part * BLOCK + tl.arange(0, BLOCK)
    exists = is_noted & (column < width)
    tl.store(noted_features + idx * width + column, tl.load(features + i * width + column, mask=exists), mask=exists)
