"""The gated activation of Llama-style feed-forward layers: silu(gate) * up."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation
from slipstream.kernels import native


def _shape(gate_up: Tensor) -> TensorSpec:
    return TensorSpec((gate_up.shape[0], gate_up.shape[1] // 2), gate_up.dtype)


@operation(_shape)
def swiglu(
    gate_up: Tensor,  # [num_tokens, 2 * intermediate], gate first
) -> Tensor:  # [num_tokens, intermediate]
    if (lib := native.usable(gate_up)) is not None and gate_up.is_contiguous():
        rows, width = gate_up.shape
        out = gate_up.new_empty(rows, width // 2)
        lib.slip_swiglu(gate_up.data_ptr(), out.data_ptr(), rows, width // 2)
        return out
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
