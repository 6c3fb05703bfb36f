"""RMS normalisation, plain and fused with the residual addition before it."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation, spec_of
from slipstream.kernels import native


def _normalise(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    # Statistics in at least float32; the weight is applied in the model's type, as the published models do.
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    # One reduction and a few operations on single numbers; torch's own rms_norm takes three times as long on a CPU.
    scale: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(weight)


def _shape(x: Tensor, weight: Tensor, eps: float) -> TensorSpec:
    return spec_of(x)


@operation(_shape)
def rms_norm(
    x: Tensor,  # [..., size]
    weight: Tensor,  # [size]
    eps: float,
) -> Tensor:
    if (lib := native.usable(x)) is not None:
        x = x.contiguous()
        out = torch.empty_like(x)
        size = x.shape[-1]
        lib.slip_rms_norm(x.data_ptr(), weight.data_ptr(), eps, out.data_ptr(), x.numel() // size, size)
        return out
    return _normalise(x, weight, eps)


def _add_shape(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[TensorSpec, TensorSpec]:
    return spec_of(x), spec_of(residual)


@operation(_add_shape)
def add_rms_norm(
    x: Tensor,  # [num_tokens, hidden]
    residual: Tensor,  # [num_tokens, hidden]
    weight: Tensor,  # [hidden]
    eps: float,
) -> tuple[Tensor, Tensor]:  # normalised sum, sum
    if (lib := native.usable(x)) is not None and x.is_contiguous() and residual.is_contiguous():
        out, total = torch.empty_like(x), torch.empty_like(x)
        arrays = (x.data_ptr(), residual.data_ptr(), weight.data_ptr(), eps, out.data_ptr(), total.data_ptr())
        lib.slip_add_rms_norm(*arrays, *x.shape)
        return out, total
    total = x + residual
    return _normalise(total, weight, eps), total
