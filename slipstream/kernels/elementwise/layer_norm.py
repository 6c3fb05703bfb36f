"""Layer normalisation, of a sum with the residual stream where there is one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.device.operation import operation
from slipstream.kernels.triton_jit import (
    early_start,
    jit,
    let_next_start,
    next_power_of_2,
    runs_triton,
    tl,
    wait_for_last,
)


@operation(like="x")
def layer_norm(
    x: Tensor,  # [num_tokens, size]
    residual: Tensor | None,  # [num_tokens, size]: added before
    weight: Tensor,  # [size]
    bias: Tensor | None,  # [size]
    eps: float,
) -> Tensor:
    if runs_triton(x):
        return _launch(x, residual, weight, bias, eps)
    # Statistics in float32 at least.
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x.to(wide) if residual is None else x.to(wide) + residual
    shift = None if bias is None else bias.to(wide)
    return F.layer_norm(total, weight.shape, weight.to(wide), shift, eps).to(x.dtype)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    out, (num_tokens, size) = torch.empty_like(x), x.shape
    block = next_power_of_2(size)
    _layer_norm_kernel[(num_tokens,)](
        x,
        residual,
        weight,
        bias,
        out,
        size,
        eps,
        ADD=residual is not None,
        SHIFT=bias is not None,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
        **early_start(x),
    )
    return out


@jit
def _layer_norm_kernel(
    x,
    residual,
    weight,
    bias,
    out,
    size,
    eps,
    ADD: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, BLOCK)
    exists = column < size
    factor = tl.load(weight + column, mask=exists, other=0.0).to(tl.float32)
    shift = tl.zeros([BLOCK], tl.float32)
    if SHIFT:
        shift = tl.load(bias + column, mask=exists, other=0.0).to(tl.float32)
    wait_for_last(EARLY)
    let_next_start(EARLY)
    value = tl.load(x + row + column, mask=exists, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row + column, mask=exists, other=0.0).to(tl.float32)
    centred = tl.where(exists, value - tl.sum(value, 0) / size, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / size + eps)
    tl.store(out + row + column, (centred * scale * factor + shift).to(out.dtype.element_ty), mask=exists)
