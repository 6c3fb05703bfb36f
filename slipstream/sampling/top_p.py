"""Top-p: the smallest set of most likely tokens whose probabilities reach p; the likeliest always stays."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.columns import Column
from slipstream.device.operation import operation
from slipstream.kernels.triton_jit import jit, runs_triton, tl
from slipstream.parameters import Parameter
from slipstream.request import Request
from slipstream.sampling.operation import SamplingOperation, Stage, is_sampled
from slipstream.sampling.threshold import BLOCK, NUM_WARPS, find_largest, find_threshold, keep_at_least
from slipstream.values import Bounds


@operation(like="logits")
def apply_top_p(
    logits: Tensor,  # [n, vocab]
    top_p: Tensor,  # [n] float32; 1 turns it off
) -> Tensor:
    if runs_triton(logits):
        return _launch(logits, top_p)
    # Stable, so that of tokens with equal logits the lowest ids stay.
    ordered, order = logits.sort(dim=1, descending=True, stable=True)
    probs = ordered.softmax(1, dtype=torch.promote_types(logits.dtype, torch.float32))
    before = probs.cumsum(1) - probs
    p = top_p.unsqueeze(1)
    dropped = (before >= p) & (p < 1.0)
    dropped[:, 0] = False
    return logits.masked_fill(torch.empty_like(dropped).scatter_(1, order, dropped), float("-inf"))


def _launch(logits: Tensor, top_p: Tensor) -> Tensor:
    logits = logits.contiguous()
    out = torch.empty_like(logits)
    if len(logits):
        _top_p_kernel[(len(logits),)](logits, top_p, out, logits.shape[1], BLOCK=BLOCK, num_warps=NUM_WARPS)
    return out


@jit
def _top_p_kernel(logits, top_p, out, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    values, out = logits + row * size, out + row * size
    p = tl.load(top_p + row)
    largest = tl.full([], float("-inf"), tl.float32)
    if p < 1.0:
        largest = find_largest(values, size, BLOCK)
    if largest > float("-inf"):
        _cut(values, out, size, p, largest, BLOCK)
    else:
        keep_at_least(values, out, size, float("-inf"), BLOCK)


@jit
def _cut(values, out, size, p, largest, BLOCK: tl.constexpr):
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(values + column, mask=column < size, other=float("-inf")).to(tl.float32)
        sums += tl.exp(x - largest)
    target = p * tl.sum(sums, 0)
    threshold, above = find_threshold(values, size, largest, target, True, BLOCK)
    # Of the tokens at the threshold the lowest ids stay, and at least one in any case.
    weight = tl.exp(threshold - largest)
    num_tied = tl.zeros_like(largest).to(tl.int32)
    for start in range(0, size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(values + column, mask=column < size, other=float("-inf"))
        tied = x.to(tl.float32) == threshold
        rank = num_tied + tl.cumsum(tied.to(tl.int32), 0) - 1
        stays = (above + rank.to(tl.float32) * weight < target) | (rank == 0)
        stays = (x.to(tl.float32) > threshold) | (tied & stays)
        tl.store(out + column, tl.where(stays, x, float("-inf")), mask=column < size)
        num_tied += tl.sum(tied.to(tl.int32), 0)


def _is_needed(request: Request) -> bool:
    return is_sampled(request) and request.params.top_p is not None and request.params.top_p < 1.0


OPERATION = SamplingOperation(
    "top_p",
    Stage.DISTRIBUTION,
    apply=lambda logits, rows, at: apply_top_p(logits, rows["top_p"][at.rows]),
    needed=_is_needed,
    parameters=(
        Parameter(
            "top_p",
            Bounds(0.0, 1.0, is_low_open=True),
            "Draw from the likeliest tokens that together have this probability; 1 is off.",
            fallback=1.0,
        ),
    ),
    columns=(Column("top_p", lambda request: request.params.top_p, "float32"),),
    after=("top_k",),
)
