"""Top-n-sigma: keeps tokens whose logit is at most n standard deviations below the largest.

As in "Top-nσ: Not All Logits Are You Need" (arXiv 2411.07641), with llama.cpp's variance: the mean square over the
finite logits. Applied before the temperature, which would scale both sides equally.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.columns import Column
from slipstream.device.operation import operation
from slipstream.kernels.triton_jit import jit, runs_triton, tl
from slipstream.parameters import Parameter
from slipstream.sampling.operation import SamplingOperation, Stage, is_sampled
from slipstream.sampling.threshold import BLOCK, NUM_WARPS, find_largest, keep_at_least
from slipstream.values import Bounds


@operation(like="logits")
def apply_top_n_sigma(
    logits: Tensor,  # [n, vocab]
    top_n_sigma: Tensor,  # [n] float32; 0 turns it off
) -> Tensor:
    if runs_triton(logits):
        return _launch(logits, top_n_sigma)
    values = logits.to(torch.promote_types(logits.dtype, torch.float32))
    is_finite = values > -torch.inf
    count = is_finite.sum(1, keepdim=True).clamp_(min=1)
    # Relative to the largest, so that few digits are lost where all logits are far from zero.
    largest = values.amax(1, keepdim=True)
    below = torch.where(is_finite, values - largest, 0.0)
    spread = torch.where(is_finite, below - below.sum(1, keepdim=True) / count, 0.0)
    sigma = (spread.square().sum(1, keepdim=True) / count).sqrt_()
    n = top_n_sigma.to(values.dtype).unsqueeze(1)
    return logits.masked_fill((below < -n * sigma) & (n > 0), float("-inf"))


def _launch(logits: Tensor, top_n_sigma: Tensor) -> Tensor:
    logits = logits.contiguous()
    out = torch.empty_like(logits)
    if len(logits):
        _top_n_sigma_kernel[(len(logits),)](logits, top_n_sigma, out, logits.shape[1], BLOCK=BLOCK, num_warps=NUM_WARPS)
    return out


@jit
def _top_n_sigma_kernel(logits, top_n_sigma, out, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    values, out = logits + row * size, out + row * size
    n = tl.load(top_n_sigma + row)
    largest = tl.full([], float("-inf"), tl.float32)
    if n > 0:
        largest = find_largest(values, size, BLOCK)
    if largest > float("-inf"):
        _cut(values, out, size, n, largest, BLOCK)
    else:
        keep_at_least(values, out, size, float("-inf"), BLOCK)


@jit
def _cut(values, out, size, n, largest, BLOCK: tl.constexpr):
    sums, counts = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        below, is_finite = _below(values, start, size, largest, BLOCK)
        sums += below
        counts += is_finite.to(tl.float32)
    count = tl.sum(counts, 0)
    mean = tl.sum(sums, 0) / count
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        below, is_finite = _below(values, start, size, largest, BLOCK)
        squares += tl.where(is_finite, (below - mean) * (below - mean), 0.0)
    limit = -n * tl.sqrt(tl.sum(squares, 0) / count)
    for start in range(0, size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(values + column, mask=column < size, other=float("-inf"))
        stays = x.to(tl.float32) - largest >= limit
        tl.store(out + column, tl.where(stays, x, float("-inf")), mask=column < size)


@jit
def _below(values, start, size, largest, BLOCK: tl.constexpr):
    """Distances to the largest, 0 where the logit is not finite, and a mask of finite logits."""
    column = start + tl.arange(0, BLOCK)
    x = tl.load(values + column, mask=column < size, other=float("-inf")).to(tl.float32)
    is_finite = x > float("-inf")
    return tl.where(is_finite, x - largest, 0.0), is_finite


OPERATION = SamplingOperation(
    "top_n_sigma",
    Stage.LOGITS,
    apply=lambda logits, rows, at: apply_top_n_sigma(logits, rows["top_n_sigma"][at.rows]),
    needed=lambda request: is_sampled(request) and request.params.top_n_sigma > 0,
    parameters=(
        Parameter(
            "top_n_sigma",
            Bounds(0.0, 100.0, may_be_none=False),
            "Drop tokens whose logit is more than this many standard deviations below the largest; 0 is off.",
            default=0.0,
        ),
    ),
    columns=(Column("top_n_sigma", lambda request: request.params.top_n_sigma, "float32"),),
)
