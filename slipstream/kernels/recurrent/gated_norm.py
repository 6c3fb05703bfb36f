"""RMS normalisation gated by silu of another tensor: the last operation of a gated delta net's heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.device.operation import operation
from slipstream.kernels.elementwise.rms_norm import rms_norm
from slipstream.kernels.triton_jit import (
    early_start,
    jit_general,
    let_next_start,
    next_power_of_2,
    runs_triton,
    tl,
    wait_for_last,
)

_TILE = 1024  # numbers per program, in whole rows


@operation(like="x")
def gated_norm(
    x: Tensor,  # [..., size]
    gate: Tensor,  # as x; heads of a joint projection may be strided
    weight: Tensor,  # [size]
    eps: float,
) -> Tensor:  # as x: normed, then gated
    if runs_triton(x):
        return _launch(x, gate, weight, eps)
    # The norm is rounded and multiplied by its weight in the model's type, the gate is not rounded.
    wide = torch.promote_types(x.dtype, torch.float32)
    return (rms_norm.body(x, weight, eps).to(wide) * F.silu(gate.to(wide))).to(x.dtype)


def _launch(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    size = x.shape[-1]
    out = x.new_empty(x.shape)
    heads = x.shape[-2] if x.ndim > 2 else 1
    x, gate = (_dense(t).reshape(-1, heads, size) for t in (x, gate))
    num_rows, block = x.shape[0] * heads, next_power_of_2(size)
    rows = max(1, _TILE // block)
    _gated_norm_kernel[(-(-num_rows // rows),)](
        x,
        gate,
        weight,
        out,
        num_rows,
        heads,
        size,
        *x.stride()[:2],
        *gate.stride()[:2],
        eps,
        ROWS=rows,
        BLOCK=block,
        num_warps=min(16, max(1, rows * block // 256)),
        **early_start(x),
    )
    return out


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@jit_general("num_rows")
def _gated_norm_kernel(
    x,
    gate,
    weight,
    out,
    num_rows,
    num_heads,
    size,
    token_stride,
    head_stride,
    gate_token_stride,
    gate_head_stride,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    token, head = (row // num_heads)[:, None], (row % num_heads)[:, None]
    exists = (row < num_rows)[:, None] & (column < size)[None, :]
    factor = tl.load(weight + column, mask=column < size, other=0.0).to(tl.float32)
    wait_for_last(EARLY)
    let_next_start(EARLY)
    value = tl.load(x + token * token_stride + head * head_stride + column[None, :], mask=exists, other=0.0)
    from_gate = gate + token * gate_token_stride + head * gate_head_stride + column[None, :]
    opening = tl.load(from_gate, mask=exists, other=0.0).to(tl.float32)
    value = value.to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 1) / size + eps)[:, None] * factor[None, :]
    value *= opening * tl.sigmoid(opening)
    tl.store(out + row[:, None] * size + column[None, :], value.to(out.dtype.element_ty), mask=exists)
