"""The mask of allowed tokens at each position. Grammars use it."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import operation


@operation(like="logits")
def apply_mask(
    logits: Tensor,  # [n, vocab]
    mask: Tensor,  # [n, ceil(vocab / 32)] int32: bit t % 32 of word t // 32 allows token t
) -> Tensor:
    bits = (mask.unsqueeze(2) >> torch.arange(32, dtype=torch.int32, device=mask.device)) & 1
    allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
    return logits.masked_fill(~allowed, float("-inf"))
