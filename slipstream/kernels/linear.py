"""Matrix product with a stored weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation


def _shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> TensorSpec:
    return TensorSpec((*x.shape[:-1], weight.shape[0]), x.dtype)


@operation(_shape)
def linear(
    x: Tensor,  # [num_tokens, in]
    weight: Tensor,  # [out, in]
    bias: Tensor | None,  # [out]
) -> Tensor:  # [num_tokens, out]
    return F.linear(x, weight, bias)


def _embedding_shape(weight: Tensor, token_ids: Tensor) -> TensorSpec:
    return TensorSpec((token_ids.shape[0], weight.shape[1]), weight.dtype)


@operation(_embedding_shape)
def embedding(
    weight: Tensor,  # [vocab, hidden]
    token_ids: Tensor,  # [num_tokens] int32
) -> Tensor:  # [num_tokens, hidden]
    return torch.index_select(weight, 0, token_ids)
