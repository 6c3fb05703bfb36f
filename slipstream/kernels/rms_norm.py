"""RMS normalisation, plain and fused with the residual addition before it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation, spec_of


def _normalise(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype in (torch.float32, torch.float64):
        return F.rms_norm(x, weight.shape, weight, eps)
    # Statistics in at least float32; the weight is applied in the model's type, as the published models do.
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def _shape(x: Tensor, weight: Tensor, eps: float) -> TensorSpec:
    return spec_of(x)


@operation(_shape)
def rms_norm(
    x: Tensor,  # [..., size]
    weight: Tensor,  # [size]
    eps: float,
) -> Tensor:
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
    total = x + residual
    return _normalise(total, weight, eps), total
