"""Moves drafts that the host has staged to the end of their rows' tokens, before the step that verifies them.

The host knows a row's tokens up to the last collected step; the device may be further. Staged drafts have a position,
so that those which are tokens by now are compared, and the rest is placed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import operation
from slipstream.kernels.request_rows import RowState
from slipstream.plan import RowStatus

NUM_HEADER_COLUMNS = 2  # the position of the first staged draft, and how many there are


@operation(writes=("rows.token_ids", "rows.num_drafts"))
def place_host_drafts(
    staged: Tensor,  # [num_rows, NUM_HEADER_COLUMNS + most] int32
    rows: RowState,  # written in part; rows without fitting drafts are unchanged
    most: int,  # drafts that a step verifies
) -> None:
    """For all rows, which are few: torch's own operations are fast enough."""
    token_ids, num_tokens = rows.token_ids, rows.num_tokens
    first, count, ids = staged[:, 0], staged[:, 1], staged[:, NUM_HEADER_COLUMNS:]
    idx = torch.arange(ids.shape[1], dtype=torch.int32, device=staged.device)
    position, length = first.unsqueeze(1) + idx, num_tokens.unsqueeze(1)
    slots = position.clamp(0, token_ids.shape[1] - 1).long()
    known = token_ids.gather(1, slots)
    is_right = (position >= length) | (ids == known)
    # The first wrong one, and whether all before it equal the row's tokens.
    given = torch.minimum((is_right.int().cumprod(1)).sum(1), count)
    num_known = num_tokens - first
    ready = (rows.status == RowStatus.RUNNING) & (rows.num_computed + 1 == num_tokens)
    ready = ready & (num_known >= 0) & (given > num_known)
    # There is always room for the last token, which the target samples itself.
    room = torch.minimum(rows.max_drafts, rows.max_total - num_tokens - 1).clamp(max=most)
    placed = torch.where(ready, torch.minimum(given - num_known, room).clamp(min=0), 0).int()
    is_placed = (position >= length) & (position < length + placed.unsqueeze(1))
    token_ids.scatter_(1, slots, torch.where(is_placed, ids, known))
    rows.num_drafts.copy_(torch.where(ready, placed, rows.num_drafts))
