"""Repetition, frequency and presence penalties.

Counts are taken from the row's own tokens at every step. That needs no counters to keep in step with preemption and
rejected drafts, and reads a few thousand integers where the model reads gigabytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation, spec_of


def _shape(
    logits: Tensor,
    batch_rows: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    prompt_len: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> TensorSpec:
    return spec_of(logits)


@operation(_shape)
def apply_penalties(
    logits: Tensor,  # [n, vocab]
    batch_rows: Tensor,  # [n] int32
    token_ids: Tensor,  # [num_rows, max_len] int32
    num_tokens: Tensor,  # [num_rows] int32: prompt and output so far
    prompt_len: Tensor,  # [num_rows] int32
    repetition: Tensor,  # [num_rows] float32; 1 is off
    frequency: Tensor,  # [num_rows] float32; 0 is off
    presence: Tensor,  # [num_rows] float32; 0 is off
) -> Tensor:
    rows = batch_rows.long()
    length = num_tokens[rows].unsqueeze(1)
    longest = max(1, int(length.max()))
    history = token_ids[rows, :longest].long()
    position = torch.arange(longest)
    exists = position < length
    is_output = exists & (position >= prompt_len[rows].unsqueeze(1))
    # Slots beyond a row's tokens hold leftovers of its last tenant; they are counted zero times.
    counts = torch.zeros(logits.shape, dtype=torch.int32)
    seen = counts.scatter_add(1, history, exists.int()) > 0
    counts.scatter_add_(1, history, is_output.int())

    factor = repetition[rows].unsqueeze(1).to(logits.dtype)
    logits = torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
    logits = logits - frequency[rows].unsqueeze(1) * counts
    return logits - presence[rows].unsqueeze(1) * (counts > 0)
