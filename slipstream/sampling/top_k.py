"""Top-k: only the k largest logits stay; those that tie with the k-th stay with it."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation, spec_of


def _shape(logits: Tensor, top_k: Tensor) -> TensorSpec:
    return spec_of(logits)


@operation(_shape)
def apply_top_k(
    logits: Tensor,  # [n, vocab]
    top_k: Tensor,  # [n] int32; 0 turns it off
) -> Tensor:
    vocab_size = logits.shape[1]
    kept = torch.where(top_k > 0, top_k, vocab_size).clamp_(max=vocab_size).long()
    largest = torch.where(top_k > 0, kept, 1).max()
    values = logits.topk(int(largest), dim=1).values
    threshold = values.gather(1, torch.where(top_k > 0, kept, 1).unsqueeze(1) - 1)
    return logits.masked_fill((logits < threshold) & (top_k > 0).unsqueeze(1), float("-inf"))
