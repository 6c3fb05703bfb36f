"""Whether a row of logits is usable, and its largest entry."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation, spec_of
from slipstream.kernels import native


def row_max(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest entry of each row and the lowest id that has it. NaN if the row holds any."""
    # torch's reductions over a vocabulary start its own thread pool, which then spins beside ours for a while.
    if (lib := native.usable(logits)) is None or not logits.is_contiguous():
        found = logits.max(1)
        return found.values, found.indices
    num_rows, size = logits.shape
    largest, index = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int64)
    pointers = (largest.data_ptr(), index.data_ptr())
    lib.slip_row_max(logits.data_ptr(), num_rows, size, *pointers, torch.get_num_threads())
    return largest, index


def without_bad_numbers(logits: Tensor) -> Tensor:
    """NaN and +inf as -inf."""
    return logits.nan_to_num(nan=float("-inf"), posinf=float("-inf"), neginf=float("-inf"))


@operation(lambda logits: (spec_of(logits), TensorSpec((logits.shape[0],), torch.bool)))
def check_logits(
    logits: Tensor,  # [n, vocab]
) -> tuple[Tensor, Tensor]:  # logits with NaN and +inf as -inf; [n] bool: the row held any, or nothing finite
    # The maximum is NaN if any entry is, +inf if any is that and -inf if nothing is allowed.
    if logits.is_cuda:
        return without_bad_numbers(logits), ~torch.isfinite(logits.amax(1))
    failed = ~torch.isfinite(row_max(logits)[0])
    return without_bad_numbers(logits) if bool(failed.any()) else logits, failed
