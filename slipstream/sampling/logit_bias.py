"""Logit bias: a number added to chosen tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation, spec_of


def _shape(logits: Tensor, batch_rows: Tensor, num_bias: Tensor, bias_ids: Tensor, bias_values: Tensor) -> TensorSpec:
    return spec_of(logits)


@operation(_shape)
def apply_logit_bias(
    logits: Tensor,  # [n, vocab]
    batch_rows: Tensor,  # [n] int32
    num_bias: Tensor,  # [num_rows] int32: how many entries of the next two count
    bias_ids: Tensor,  # [num_rows, max_bias] int32
    bias_values: Tensor,  # [num_rows, max_bias] float32
) -> Tensor:
    rows = batch_rows.long()
    counts = torch.arange(bias_ids.shape[1], device=logits.device) < num_bias[rows].unsqueeze(1)
    ids = torch.where(counts, bias_ids[rows].long(), 0)
    values = torch.where(counts, bias_values[rows], 0.0).to(logits.dtype)
    return logits.scatter_add(1, ids, values)
