"""The activation of encoders' feed-forward layers: gelu by the error function, or by its approximation with tanh."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from slipstream.device.operation import operation


@operation(like="x")
def gelu(
    x: Tensor,  # [num_tokens, size]
    tanh: bool,
) -> Tensor:
    return F.gelu(x, approximate="tanh" if tanh else "none")
