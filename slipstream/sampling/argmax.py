"""The last step of every sampler: the largest entry, lowest id on ties, and whether the row can be trusted."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation, spec_of


def _shape(logits: Tensor) -> TensorSpec:
    return TensorSpec((logits.shape[0],), torch.int64)


@operation(_shape)
def argmax(
    logits: Tensor,  # [n, vocab]
) -> Tensor:  # [n] int64, always inside the vocabulary
    return logits.argmax(1)


def _check_shape(logits: Tensor) -> tuple[TensorSpec, TensorSpec]:
    return spec_of(logits), TensorSpec((logits.shape[0],), torch.bool)


@operation(_check_shape)
def check_logits(
    logits: Tensor,  # [n, vocab]
) -> tuple[Tensor, Tensor]:  # logits with NaN and +inf as -inf; [n] bool: the row held any, or nothing finite
    # The maximum is NaN if any entry is, +inf if any is that and -inf if nothing is allowed.
    failed = ~torch.isfinite(logits.amax(1))
    if bool(failed.any()):
        logits = logits.nan_to_num(nan=float("-inf"), posinf=float("-inf"), neginf=float("-inf"))
    return logits, failed
