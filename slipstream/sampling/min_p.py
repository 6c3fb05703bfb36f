"""Min-p: tokens less likely than this share of the likeliest one are dropped."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation, spec_of


def _shape(logits: Tensor, min_p: Tensor) -> TensorSpec:
    return spec_of(logits)


@operation(_shape)
def apply_min_p(
    logits: Tensor,  # [n, vocab]
    min_p: Tensor,  # [n] float32; 0 turns it off
) -> Tensor:
    # p >= min_p * p_max is a statement about differences of logits, so no softmax is needed; log(0) is -inf: all stay.
    threshold = logits.amax(1, keepdim=True) + torch.log(min_p).unsqueeze(1)
    return logits.masked_fill(logits < threshold, float("-inf"))
