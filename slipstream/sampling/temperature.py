"""Temperature: logits divided by it. Zero stands for greedy and leaves the order, hence the row, alone."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation, spec_of


def _shape(logits: Tensor, temperature: Tensor) -> TensorSpec:
    return spec_of(logits)


@operation(_shape)
def apply_temperature(
    logits: Tensor,  # [n, vocab]
    temperature: Tensor,  # [n] float32
) -> Tensor:
    return logits / torch.where(temperature > 0, temperature, 1.0).unsqueeze(1)
