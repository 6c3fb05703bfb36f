"""The staged write: every change the host makes to device state in a step, applied by one scatter."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import operation, writes_only


@operation(writes_only, writes=("store",))
def write_rows(
    store: Tensor,  # [size] int32, the flat row store
    staged: Tensor,  # [3 * n] int32: n int64 destinations, then n int32 values; destinations are distinct
) -> None:
    n = staged.shape[0] // 3
    store[staged[: 2 * n].view(torch.int64)] = staged[2 * n :]
