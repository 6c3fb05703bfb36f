"""Notes of steps that a head makes no drafts behind: what it would have been shown, for many steps at once.

A head that keeps up with every step reads its weights in every step. With notes it reads them once in a while: when the
notes are full, or a step is to come that wants the head's keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream.device.operation import operation
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

if TYPE_CHECKING:
    from slipstream.speculate.speculator import DraftRows


class DraftNotes:
    """A place on the device for each of so many steps and each request, and those of padding."""

    def __init__(self, max_reqs: int, width: int, dtype: torch.dtype, place: torch.device) -> None:
        # A step too many, which nobody takes, would go behind the end.
        size = (NUM_NOTED_STEPS + 1) * max_reqs
        self._first = torch.full((max_reqs,), -1, dtype=torch.int32, device=place)
        self.input_ids = torch.zeros(size, dtype=torch.int32, device=place)
        self.positions = torch.zeros(size, dtype=torch.int64, device=place)
        self.slots = torch.full((size,), -1, dtype=torch.int64, device=place)
        self.features = torch.zeros(size, width, dtype=dtype, device=place)

    def clear(self) -> None:
        self._first.fill_(-1)
        self.slots.fill_(-1)

    def add(self, batch_rows: Tensor, rows: DraftRows, positions: Tensor, slots: Tensor, features: Tensor) -> None:
        write_notes(
            *(batch_rows, rows.token_ids, rows.num_computed, rows.num_tokens, rows.ran, positions, slots, features),
            *(NUM_NOTED_STEPS, self._first[: len(batch_rows)], rows.draft_start, rows.draft_end),
            *(self.input_ids, self.positions, self.slots, self.features),
        )


@operation(
    writes=("first", "draft_start", "draft_end", "noted_ids", "noted_positions", "noted_slots", "noted_features"),
)
def write_notes(
    batch_rows: Tensor,  # [n] int32; padding names the scratch row, which never runs
    token_ids: Tensor,  # [num_rows, max_len] int32
    num_computed: Tensor,  # [num_rows] int32: after the step
    num_tokens: Tensor,  # [num_rows] int32
    ran: Tensor,  # [num_rows] int32: 1 + where the step began; 0: it did not run
    positions: Tensor,  # [n] int64: of the step, one token a request
    slots: Tensor,  # [n] int64; -1 for tokens that do not exist
    features: Tensor,  # [n, width]
    most: int,  # steps
    # written; of notes, [step, n] one behind the other:
    first: Tensor,  # [n] int32: the position of a request's first note; -1: it has none
    draft_start: Tensor,  # [num_rows] int32: from where on the row has the drafter's keys, or notes
    draft_end: Tensor,  # [num_rows] int32: up to where
    noted_ids: Tensor,  # the token behind the step's
    noted_positions: Tensor,
    noted_slots: Tensor,
    noted_features: Tensor,
) -> None:
    """From one step to the next a request moves on by one: its position says which note this is."""
    n, width = features.shape
    if runs_triton(features):
        assert features.is_contiguous() and noted_features.is_contiguous()
        block = min(4096, next_power_of_2(width))
        _notes_kernel[(n, -(-width // block))](
            *(batch_rows, token_ids, num_computed, num_tokens, ran, positions, slots, features, most),
            *(first, draft_start, draft_end, noted_ids, noted_positions, noted_slots, noted_features),
            *(n, token_ids.stride(0), width),
            BLOCK=block,
            num_warps=max(1, block // 512),
            **early_start(features),
        )
        return
    rows = batch_rows.long()
    begun, runs = ran[rows] - 1, ran[rows] > 0
    draft_start[rows] = torch.where(runs & (begun > draft_end[rows]), begun, draft_start[rows])
    draft_end[rows] = torch.where(runs, num_computed[rows], draft_end[rows])
    noted = slots >= 0
    first.copy_(torch.where(noted & (first < 0), positions.int(), first))
    places = ((positions - first).clamp(0, most) * n + torch.arange(n))[noted]
    is_known = runs & (positions + 1 < num_tokens[rows])
    behind = torch.where(is_known, token_ids[rows, torch.where(is_known, positions + 1, 0)], 0)
    noted_ids[places], noted_positions[places] = behind[noted], positions[noted]
    noted_slots[places], noted_features[places] = slots[noted], features[noted]


@jit
def _notes_kernel(
    batch_rows,
    token_ids,
    num_computed,
    num_tokens,
    ran,
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
    # Whether another program has written the first position already or not: the place is the first.
    step = tl.where(begin < 0, 0, tl.minimum(tl.maximum(position - begin, 0), most))
    place = step * n + i
    if part == 0:
        begun = tl.load(ran + row) - 1
        runs = begun >= 0
        computed, end = tl.load(num_computed + row), tl.load(draft_end + row)
        tl.store(draft_start + row, begun, mask=runs & (begun > end))
        tl.store(draft_end + row, computed, mask=runs)
        tl.store(first + i, position.to(tl.int32), mask=is_noted & (begin < 0))
        is_known = runs & (position + 1 < tl.load(num_tokens + row))
        behind = tl.load(token_ids + row * max_len + position + 1, mask=is_known, other=0)
        tl.store(noted_ids + place, behind, mask=is_noted)
        tl.store(noted_positions + place, position, mask=is_noted)
        tl.store(noted_slots + place, slot, mask=is_noted)
    column = part * BLOCK + tl.arange(0, BLOCK)
    exists = is_noted & (column < width)
    tl.store(noted_features + place * width + column, tl.load(features + i * width + column, mask=exists), mask=exists)
