"""The gated activation of Gemma's feed-forward layers: gelu(gate) * up, with the tanh form of gelu."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation
from slipstream.kernels.elementwise.swiglu import launch_gated, swiglu
from slipstream.kernels.triton_jit import runs_triton


@operation(lambda gate_up: TensorSpec((gate_up.shape[0], gate_up.shape[1] // 2), gate_up.dtype))
def geglu(
    gate_up: Tensor,  # [num_tokens, 2 * intermediate], gate first
) -> Tensor:  # [num_tokens, intermediate]
    if runs_triton(gate_up):
        return launch_gated(gate_up, gelu=True)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


# Gated activations by the name of the gate's function.
ACTIVATIONS = {"silu": swiglu, "gelu_tanh": geglu}
