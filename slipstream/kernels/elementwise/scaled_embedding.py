"""Embedding lookup times a constant, for models whose table is shared with the head and cannot hold the product."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation


@operation(lambda weight, token_ids: TensorSpec((token_ids.shape[0], weight.shape[1]), weight.dtype))
def scaled_embedding(
    weight: Tensor,  # [vocab, hidden]
    token_ids: Tensor,  # [num_tokens] int32
    scale: float,
) -> Tensor:  # [num_tokens, hidden]
    # The constant is rounded to the weights' type first, as it was when the models were trained.
    rounded = torch.tensor(scale, dtype=weight.dtype, device="cpu")
    return torch.index_select(weight, 0, token_ids) * rounded
