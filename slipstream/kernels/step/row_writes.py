"""The staged write: all changes of the host to device state in a step, applied by one scatter."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import operation
from slipstream.kernels.triton_jit import jit, runs_triton, tl

_BLOCK = 1024


@operation(writes=("store",))
def write_rows(
    store: Tensor,  # [size] int32, the flat row store
    staged: Tensor,  # [3 * n] int32: n int64 destinations, then n int32 values; destinations are distinct
) -> None:
    n = staged.shape[0] // 3
    destinations, values = staged[: 2 * n].view(torch.int64), staged[2 * n :]
    if runs_triton(store):
        _write_kernel[(-(-n // _BLOCK),)](store, destinations, values, n, BLOCK=_BLOCK)
    else:
        store[destinations] = values


@jit
def _write_kernel(store, destinations, values, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = i < n
    tl.store(store + tl.load(destinations + i, mask=exists, other=0), tl.load(values + i, mask=exists), mask=exists)
