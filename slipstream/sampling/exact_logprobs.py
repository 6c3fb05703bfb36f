"""``pack_logprobs`` with values that depend on a row's logits alone, to the bit, and equal values by ascending id.

torch may sum a row in an order that depends on where it lies in memory, and choose among equal values by the number of
rows. Here weights are integers, multiples of 2^-40, whose sum is the same in any order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation
from slipstream.kernels.triton_jit import jit, jit_general, runs_triton, tl
from slipstream.sampling.logprobs import LOGPROB_WIDTH, pack
from slipstream.sampling.threshold import BLOCK, NUM_WARPS, find_largest
from slipstream.sampling_params import MAX_LOGPROBS

_UNITS = 2.0**40  # of a weight; the largest weighs 1


@operation(lambda logits: TensorSpec((logits.shape[0], LOGPROB_WIDTH), torch.int32))
def pack_exact_logprobs(
    logits: Tensor,  # [n, vocab]
    token_ids: Tensor,  # [n] int64
) -> Tensor:  # [n, LOGPROB_WIDTH] int32
    logprobs = (logits - _log_sums(logits).unsqueeze(1)).float()
    num_top = min(MAX_LOGPROBS, logits.shape[1])
    # A number above a half of 64 bits, and an id below it that makes all of them different.
    bits = logprobs.view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() << 32
    last = logits.shape[1] - 1
    chosen = (ordered + (last - torch.arange(logits.shape[1], device=logits.device))).topk(num_top, dim=1).values
    ids = last - (chosen & 0xFFFFFFFF)
    return pack(logprobs, token_ids, logprobs.gather(1, ids), ids)


def _log_sums(logits: Tensor) -> Tensor:
    """[n]: the logarithm of each row's sum of weights."""
    if runs_triton(logits):
        logits = logits.contiguous()
        sums = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
        if len(logits):
            options = {"UNITS": _UNITS, "BLOCK": BLOCK, "num_warps": NUM_WARPS, "enable_fp_fusion": False}
            _log_sum_kernel[(len(logits),)](logits, sums, logits.shape[1], **options)
        return sums
    if not len(logits):
        return logits.new_empty(0)
    # Row by row: torch computes what is left over after vectors in another way.
    return torch.cat([_log_sum(row) for row in logits.to(torch.promote_types(logits.dtype, torch.float32))])


def _log_sum(row: Tensor) -> Tensor:
    largest = row.amax(0, keepdim=True)
    units = ((row - largest).exp() * _UNITS + 0.5).to(torch.int64).sum(0, keepdim=True)
    return largest + torch.log(units.to(row.dtype) / _UNITS)


@jit
def _units_of(x, largest, UNITS: tl.constexpr):
    return (tl.exp(x - largest) * UNITS + 0.5).to(tl.int64)


@jit_general("size")
def _log_sum_kernel(logits, sums, size, UNITS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    values = logits + row * size
    largest = find_largest(values, size, BLOCK)
    units = tl.zeros([BLOCK], tl.int64)
    for start in range(0, size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(values + column, mask=column < size, other=float("-inf")).to(tl.float32)
        units += _units_of(x, largest, UNITS)
    tl.store(sums + row, largest + tl.log(tl.sum(units, 0).to(tl.float32) / UNITS))
