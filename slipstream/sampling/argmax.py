"""The last step of every sampler: the largest entry, lowest id on ties, and whether the row can be trusted."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation, spec_of
from slipstream.kernels import native


def _native_row_max(logits: Tensor) -> tuple[Tensor, Tensor] | None:
    """The largest entry of each row and its place, by the C kernel where it serves.

    torch's reductions over a vocabulary start its own pool of threads, which then spins beside ours for a while.
    """
    if (lib := native.usable(logits)) is None or not logits.is_contiguous():
        return None
    num_rows, size = logits.shape
    largest, index = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int64)
    pointers = (largest.data_ptr(), index.data_ptr())
    lib.slip_row_max(logits.data_ptr(), num_rows, size, *pointers, torch.get_num_threads())
    return largest, index


def _shape(logits: Tensor) -> TensorSpec:
    return TensorSpec((logits.shape[0],), torch.int64)


@operation(_shape)
def argmax(
    logits: Tensor,  # [n, vocab]
) -> Tensor:  # [n] int64, always inside the vocabulary
    found = _native_row_max(logits)
    return logits.argmax(1) if found is None else found[1]


def _check_shape(logits: Tensor) -> tuple[TensorSpec, TensorSpec]:
    return spec_of(logits), TensorSpec((logits.shape[0],), torch.bool)


@operation(_check_shape)
def check_logits(
    logits: Tensor,  # [n, vocab]
) -> tuple[Tensor, Tensor]:  # logits with NaN and +inf as -inf; [n] bool: the row held any, or nothing finite
    # The maximum is NaN if any entry is, +inf if any is that and -inf if nothing is allowed.
    found = _native_row_max(logits)
    failed = ~torch.isfinite(logits.amax(1) if found is None else found[0])
    if bool(failed.any()):
        logits = logits.nan_to_num(nan=float("-inf"), posinf=float("-inf"), neginf=float("-inf"))
    return logits, failed
