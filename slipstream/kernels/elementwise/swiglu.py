"""The gated activation of Llama-style feed-forward layers: silu(gate) * up."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation
from slipstream.kernels import native
from slipstream.kernels.triton_jit import (
    early_start,
    jit,
    let_next_start,
    next_power_of_2,
    runs_triton,
    tl,
    wait_for_last,
)


@operation(lambda gate_up: TensorSpec((gate_up.shape[0], gate_up.shape[1] // 2), gate_up.dtype))
def swiglu(
    gate_up: Tensor,  # [num_tokens, 2 * intermediate], gate first
) -> Tensor:  # [num_tokens, intermediate]
    if runs_triton(gate_up):
        return launch_gated(gate_up, gelu=False)
    if (lib := native.usable(gate_up)) is not None and gate_up.is_contiguous():
        rows, width = gate_up.shape
        out = gate_up.new_empty(rows, width // 2)
        lib.slip_swiglu(gate_up.data_ptr(), out.data_ptr(), rows, width // 2)
        return out
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def launch_gated(gate_up: Tensor, gelu: bool) -> Tensor:
    """``silu(gate) * up``, or with gelu in the tanh form instead."""
    gate_up = gate_up.contiguous()
    num_tokens, width = gate_up.shape
    size = width // 2
    out = gate_up.new_empty(num_tokens, size)
    block = min(1024, next_power_of_2(size))
    _gated_kernel[(num_tokens, -(-size // block))](
        gate_up, out, size, GELU=gelu, BLOCK=block, num_warps=4, **early_start(gate_up)
    )
    return out


@jit
def _gated_kernel(gate_up, out, size, GELU: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    wait_for_last(EARLY)
    let_next_start(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < size
    gate = tl.load(gate_up + row * 2 * size + column, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + column, mask=exists, other=0.0).to(tl.float32)
    if GELU:
        # (1 + tanh(y)) / 2 is sigmoid(2 y).
        gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        gate = gate * tl.sigmoid(gate)
    tl.store(out + row * size + column, (gate * up).to(out.dtype.element_ty), mask=exists)
