"""Bad words: a token that would complete a forbidden sequence gets no chance."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation, spec_of


def _shape(
    logits: Tensor,
    batch_rows: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    num_bad_words: Tensor,
    bad_words: Tensor,
) -> TensorSpec:
    return spec_of(logits)


@operation(_shape)
def ban_bad_words(
    logits: Tensor,  # [n, vocab]
    batch_rows: Tensor,  # [n] int32
    token_ids: Tensor,  # [num_rows, max_len] int32
    positions: Tensor,  # [n] int32: how many tokens come before the one to be drawn
    num_bad_words: Tensor,  # [num_rows] int32
    bad_words: Tensor,  # [num_rows, max_words, max_tokens] int32, each at the right end, -1 before it
) -> Tensor:
    rows = batch_rows.long()
    words = bad_words[rows]
    counts = torch.arange(words.shape[1], device=logits.device) < num_bad_words[rows].unsqueeze(1)
    num_before = words.shape[2] - 1
    position = positions.long().unsqueeze(1) - num_before + torch.arange(num_before, device=logits.device)
    tail = token_ids[rows.unsqueeze(1), position.clamp(min=0)]
    tail = torch.where(position >= 0, tail, -2)  # equal to no token and to no padding
    begins = words[:, :, :-1]
    complete = ((begins == -1) | (begins == tail.unsqueeze(1))).all(2) & counts
    banned = torch.zeros_like(logits, dtype=torch.int32)
    banned.scatter_add_(1, torch.where(complete, words[:, :, -1], 0).long(), complete.int())
    return logits.masked_fill(banned > 0, float("-inf"))
