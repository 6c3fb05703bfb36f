"""Forced acceptance, for benchmarks: drafts are accepted at given rates, whatever they are. The text is meaningless."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation
from slipstream.kernels.triton_jit import early_start, jit, let_next_start, runs_triton, tl, wait_for_last
from slipstream.sampling.philox import MASK, philox

# Purpose of the noise, besides those of sampling and of rejection.
SYNTHETIC_NOISE = 4
_BLOCK = 128


@operation(lambda logit_rows: TensorSpec((logit_rows.shape[0],), torch.bool))
def force_acceptance(
    logit_rows: Tensor,  # [n] int32: the request row
    positions: Tensor,  # [n] int32: position of the draft
    num_tokens: Tensor,  # [num_rows] int32: position of the row's first draft
    seeds: Tensor,  # [num_rows, 2] int32
    choice: Tensor,  # [num_rows] int32
    rates: Tensor,  # [k] float32: the probability that the drafts up to this one are all accepted
) -> Tensor:  # [n] bool
    """One random number for all drafts of a row: a draft is accepted if it is below the draft's rate."""
    k = rates.shape[0]
    if runs_triton(logit_rows):
        n = logit_rows.shape[0]
        accepted = torch.empty(n, dtype=torch.bool, device=logit_rows.device)
        _force_kernel[(-(-n // _BLOCK),)](
            logit_rows,
            positions,
            num_tokens,
            seeds,
            choice,
            rates,
            accepted,
            n,
            k,
            PURPOSE=SYNTHETIC_NOISE,
            BLOCK=_BLOCK,
            **early_start(logit_rows),
        )
        return accepted
    rows = logit_rows.long()
    first = num_tokens[rows].long()
    idx = positions.long() - first
    low, high = (seeds[rows].long() & MASK).unbind(1)
    zeros = torch.zeros_like(first)
    bits = philox((zeros, first & MASK, zeros + SYNTHETIC_NOISE, choice[rows].long()), (low, high))[0]
    uniform = ((bits + 0.5) * 2.0**-32).float()
    return (idx < k) & (uniform < rates[idx.clamp(max=k - 1)])


@jit
def _force_kernel(
    logit_rows,
    positions,
    num_tokens,
    seeds,
    choice,
    rates,
    accepted,
    n,
    k,
    PURPOSE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_last(EARLY)
    let_next_start(EARLY)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = i < n
    row = tl.load(logit_rows + i, mask=exists, other=0).to(tl.int64)
    first = tl.load(num_tokens + row)
    idx = tl.load(positions + i, mask=exists, other=0) - first
    low = tl.load(seeds + 2 * row).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(seeds + 2 * row + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    bits, _, _, _ = tl.philox((high << 32) | low, tl.zeros_like(first), first, PURPOSE, tl.load(choice + row))
    uniform = (bits.to(tl.float32) + 0.5) * (1.0 / 4294967296.0)
    rate = tl.load(rates + tl.minimum(tl.maximum(idx, 0), k - 1))
    tl.store(accepted + i, (idx < k) & (uniform < rate), mask=exists)
