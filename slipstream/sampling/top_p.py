"""Top-p: the smallest set of most likely tokens whose probabilities reach p; the likeliest always stays."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation, spec_of


def _shape(logits: Tensor, top_p: Tensor) -> TensorSpec:
    return spec_of(logits)


@operation(_shape)
def apply_top_p(
    logits: Tensor,  # [n, vocab]
    top_p: Tensor,  # [n] float32; 1 turns it off
) -> Tensor:
    # Stable, so that of equal tokens the lowest ids stay.
    ordered, order = logits.sort(dim=1, descending=True, stable=True)
    probs = ordered.softmax(1, dtype=torch.promote_types(logits.dtype, torch.float32))
    before = probs.cumsum(1) - probs
    p = top_p.unsqueeze(1)
    dropped = (before >= p) & (p < 1.0)
    dropped[:, 0] = False
    return logits.masked_fill(torch.empty_like(dropped).scatter_(1, order, dropped), float("-inf"))
