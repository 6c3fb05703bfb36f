"""Whether a row of logits is usable, and its largest entry."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation, spec_of
from slipstream.kernels import native


class Maxima(NamedTuple):
    """Of each row of logits."""

    values: Tensor  # [n]: the largest entry; NaN if the row holds any
    columns: Tensor  # [n] int64: the lowest column that has it
    failed: Tensor  # [n] bool: NaN or +inf in the row, or nothing finite
    any_failed: bool


def find_maxima(logits: Tensor) -> Maxima:
    # torch's reductions over a vocabulary start its own thread pool, which then spins beside ours for a while.
    if (lib := native.usable(logits)) is None or not logits.is_contiguous():
        found = logits.max(1)
        failed = ~torch.isfinite(found.values)
        return Maxima(found.values, found.indices, failed, bool(failed.any()))
    num_rows, size = logits.shape
    values, index = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int64)
    failed = torch.empty(num_rows, dtype=torch.bool)
    arrays = (values.data_ptr(), index.data_ptr(), failed.data_ptr())
    any_failed = lib.slip_row_max(logits.data_ptr(), num_rows, size, *arrays, torch.get_num_threads())
    return Maxima(values, index, failed, bool(any_failed))


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
    found = find_maxima(logits)
    return without_bad_numbers(logits) if found.any_failed else logits, found.failed
