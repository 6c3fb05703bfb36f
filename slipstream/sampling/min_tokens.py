"""Min tokens: until a row is long enough, nothing that would end it can be drawn."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation, spec_of


def _shape(logits: Tensor, batch_rows: Tensor, positions: Tensor, min_total: Tensor, stop_ids: Tensor) -> TensorSpec:
    return spec_of(logits)


@operation(_shape)
def hold_back_stops(
    logits: Tensor,  # [n, vocab]
    batch_rows: Tensor,  # [n] int32
    positions: Tensor,  # [n] int32: how many tokens come before the one to be drawn
    min_total: Tensor,  # [num_rows] int32: prompt and the least output
    stop_ids: Tensor,  # [num_rows, max_stop_ids] int32, padded with -1
) -> Tensor:
    rows = batch_rows.long()
    ids = stop_ids[rows].long()
    held = (ids >= 0) & (positions < min_total[rows]).unsqueeze(1)
    banned = torch.zeros_like(logits, dtype=torch.int32)
    banned.scatter_add_(1, ids.clamp(min=0), held.int())
    return logits.masked_fill(banned > 0, float("-inf"))
