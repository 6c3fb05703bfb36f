"""Notes of steps that a head makes no drafts behind: what it would have been shown, for many steps at once.

A head that keeps up with every step reads its weights in every step. With notes it reads them once in a while: when the
notes are full, or a step is to come that wants the head's keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import operation, writes_only
from slipstream.kernels.triton_jit import (
    early_start,
    jit,
    let_next_start,
    next_power_of_2,
    runs_triton,
    tl,
    wait_for_last,
)

NUM_NOTED_STEPS = 16  # at most; a power of two


class DraftNotes:
    """A list of tokens on the device: a step adds its own, one for each request and those of padding."""

    def __init__(self, max_reqs: int, width: int, dtype: torch.dtype, place: torch.device) -> None:
        # A step that finds the list full, as when recordings are timed, writes behind its end.
        self._most, size = NUM_NOTED_STEPS * max_reqs, (NUM_NOTED_STEPS + 1) * max_reqs
        self._count = torch.zeros(1, dtype=torch.int32, device=place)
        self.input_ids = torch.zeros(size, dtype=torch.int32, device=place)
        self.positions = torch.zeros(size, dtype=torch.int64, device=place)
        self.slots = torch.full((size,), -1, dtype=torch.int64, device=place)
        self.features = torch.zeros(size, width, dtype=dtype, device=place)

    def clear(self) -> None:
        self._count.zero_()
        self.slots.fill_(-1)

    def add(self, input_ids: Tensor, positions: Tensor, slots: Tensor, features: Tensor) -> None:
        write_notes(
            *(self._count, self._most, input_ids, positions, slots, features),
            *(self.input_ids, self.positions, self.slots, self.features),
        )
        self._count += input_ids.shape[0]


@operation(writes_only, writes=("noted_ids", "noted_positions", "noted_slots", "noted_features"))
def write_notes(
    count: Tensor,  # [1] int32: notes there are
    most: int,
    input_ids: Tensor,  # [n] int32
    positions: Tensor,  # [n] int64
    slots: Tensor,  # [n] int64; -1 for tokens that do not exist
    features: Tensor,  # [n, width]
    # written from the count on, or from ``most`` on if that is less:
    noted_ids: Tensor,
    noted_positions: Tensor,
    noted_slots: Tensor,
    noted_features: Tensor,
) -> None:
    n, width = features.shape
    if runs_triton(features):
        assert features.is_contiguous() and noted_features.is_contiguous()
        block = min(4096, next_power_of_2(width))
        _notes_kernel[(n, -(-width // block))](
            *(count, most, input_ids, positions, slots, features),
            *(noted_ids, noted_positions, noted_slots, noted_features, width),
            BLOCK=block,
            num_warps=max(1, block // 512),
            **early_start(features),
        )
        return
    places = count.clamp(max=most) + torch.arange(n, device=count.device)
    noted_ids.index_copy_(0, places, input_ids)
    noted_positions.index_copy_(0, places, positions)
    noted_slots.index_copy_(0, places, slots)
    noted_features.index_copy_(0, places, features)


@jit
def _notes_kernel(
    count,
    most,
    input_ids,
    positions,
    slots,
    features,
    noted_ids,
    noted_positions,
    noted_slots,
    noted_features,
    width,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_last(EARLY)
    let_next_start(EARLY)
    i, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.minimum(tl.load(count), most) + i
    if part == 0:
        tl.store(noted_ids + place, tl.load(input_ids + i))
        tl.store(noted_positions + place, tl.load(positions + i))
        tl.store(noted_slots + place, tl.load(slots + i))
    column = part * BLOCK + tl.arange(0, BLOCK)
    exists = column < width
    tl.store(noted_features + place * width + column, tl.load(features + i * width + column, mask=exists), mask=exists)
