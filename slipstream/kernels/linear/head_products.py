"""A product of each head with a matrix of its own: how latent attention goes from latents to heads and back."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation


def _shape(x: Tensor, weight: Tensor) -> TensorSpec:
    return TensorSpec((x.shape[0], x.shape[1], weight.shape[2]), x.dtype)


@operation(_shape)
def project_heads(
    x: Tensor,  # [num_tokens, num_heads, size], strided or not
    weight: Tensor,  # [num_heads, size, out_size]
) -> Tensor:  # [num_tokens, num_heads, out_size]
    out = torch.empty(x.shape[0], x.shape[1], weight.shape[2], dtype=x.dtype, device=x.device)
    # Written in place, token by token, so that what comes next need not copy it.
    torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
    return out
