"""A dense layer with an activation, in the type of its weight: what comes after pooling."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
}


@operation(lambda x, weight: TensorSpec((x.shape[0], weight.shape[0]), weight.dtype))
def dense_step(
    x: Tensor,  # [n, in_size]
    weight: Tensor,  # [out_size, in_size]
    bias: Tensor | None,  # [out_size]
    activation: str,  # a name in ACTIVATIONS
) -> Tensor:  # [n, out_size]
    return ACTIVATIONS[activation](F.linear(x.to(weight.dtype), weight, bias))
