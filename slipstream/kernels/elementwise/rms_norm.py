"""RMS normalisation, plain and fused with the residual addition before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.device.operation import operation
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


def _normalise(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    # Statistics in at least float32; the weight is applied in the model's type, as the published models do.
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    # One reduction and a few operations on single numbers; torch's own rms_norm takes three times as long on a CPU.
    scale: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(weight)


@operation(like="x")
def rms_norm(
    x: Tensor,  # [..., size]
    weight: Tensor,  # [size]
    eps: float,
) -> Tensor:
    if runs_triton(x):
        return _launch(x, weight, eps)
    if (lib := native.usable(x)) is not None:
        x = x.contiguous()
        out = torch.empty_like(x)
        size = x.shape[-1]
        lib.slip_rms_norm(x.data_ptr(), weight.data_ptr(), eps, out.data_ptr(), x.numel() // size, size)
        return out
    return _normalise(x, weight, eps)


@operation(like=("x", "residual"))
def add_rms_norm(
    x: Tensor,  # [num_tokens, hidden]
    residual: Tensor,  # [num_tokens, hidden]
    weight: Tensor,  # [hidden]
    eps: float,
) -> tuple[Tensor, Tensor]:  # normalised sum, sum
    if runs_triton(x):
        return _launch_add(x, residual, weight, eps)
    if (lib := native.usable(x)) is not None and x.is_contiguous() and residual.is_contiguous():
        out, total = torch.empty_like(x), torch.empty_like(x)
        arrays = (x.data_ptr(), residual.data_ptr(), weight.data_ptr(), eps, out.data_ptr(), total.data_ptr())
        lib.slip_add_rms_norm(*arrays, *x.shape)
        return out, total
    total = x + residual
    return _normalise(total, weight, eps), total


def _options(x: Tensor) -> dict[str, Any]:
    # A row stays in registers, however long, and is read once: the longest in use, 18432, needs half of them.
    block = next_power_of_2(x.shape[-1])
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512)), **early_start(x)}


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _launch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    size = x.shape[-1]
    out = x.new_empty(x.shape)
    # The heads of a joint projection are strided and are read in place.
    heads = x.shape[-2] if x.ndim > 2 else 1
    rows = _dense_rows(x.reshape(-1, heads, size))
    _rms_norm_kernel[(rows.shape[0] * heads,)](
        rows, rows, weight, out, out, heads, size, *rows.stride()[:2], 0, eps, ADD=False, **_options(x)
    )
    return out


def _launch_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x, residual = _dense_rows(x), _dense_rows(residual)
    num_tokens, size = x.shape
    out, total = x.new_empty(x.shape), residual.new_empty(x.shape)
    _rms_norm_kernel[(num_tokens,)](
        x, residual, weight, out, total, 1, size, x.stride(0), 0, residual.stride(0), eps, ADD=True, **_options(x)
    )
    return out, total


@jit
def _rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    total,
    num_heads,
    size,
    token_stride,
    head_stride,
    residual_stride,
    eps,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token, head = row // num_heads, row % num_heads
    column = tl.arange(0, BLOCK)
    exists = column < size
    factor = tl.load(weight + column, mask=exists, other=0.0).to(tl.float32)
    wait_for_last(EARLY)
    let_next_start(EARLY)
    value = tl.load(x + token * token_stride + head * head_stride + column, mask=exists, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + token * residual_stride + column, mask=exists, other=0.0).to(tl.float32)
        # The sum is rounded when it becomes the residual; the norm applies to the rounded sum.
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * size + column, rounded, mask=exists)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / size + eps)
    tl.store(out + row * size + column, (value * scale * factor).to(out.dtype.element_ty), mask=exists)
