"""Temperature: divides logits. Zero means greedy and leaves a row unchanged, since only the order matters."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.columns import Column
from slipstream.device.operation import operation
from slipstream.parameters import Parameter
from slipstream.sampling.operation import SamplingOperation, Stage, is_sampled
from slipstream.values import Bounds

# Keeps logits within float32: far below this temperature the draw is the argmax anyway.
LEAST_TEMPERATURE = 1e-30


def divisor(temperature: Tensor) -> Tensor:
    return torch.where(temperature > 0, temperature.clamp(min=LEAST_TEMPERATURE), 1.0)


@operation(like="logits")
def apply_temperature(
    logits: Tensor,  # [n, vocab]
    temperature: Tensor,  # [n] float32
) -> Tensor:
    return logits / divisor(temperature).unsqueeze(1)


OPERATION = SamplingOperation(
    "temperature",
    Stage.TEMPERATURE,
    apply=lambda logits, rows, at: apply_temperature(logits, rows.temperature[at.rows]),
    needed=is_sampled,
    parameters=(
        Parameter(
            "temperature",
            Bounds(0.0, 100.0),
            "Randomness: 0 always takes the likeliest token, 1 is the model's own distribution.",
            fallback=1.0,
        ),
    ),
    columns=(Column("temperature", lambda request: request.params.temperature, "float32"),),
)
