"""Top-k: only the k largest logits stay, together with those that equal the k-th."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slipstream.columns import Column
from slipstream.device.operation import operation
from slipstream.kernels.triton_jit import jit, runs_triton, tl
from slipstream.parameters import Parameter
from slipstream.sampling.operation import SamplingOperation, Stage, is_sampled
from slipstream.sampling.threshold import BLOCK, NUM_WARPS, find_largest, find_threshold, keep_at_least
from slipstream.values import MAX_INT32, Bounds


@operation(like="logits")
def apply_top_k(
    logits: Tensor,  # [n, vocab]
    top_k: Tensor,  # [n] int32; 0 turns it off
) -> Tensor:
    if runs_triton(logits):
        return _launch(logits, top_k)
    vocab_size = logits.shape[1]
    kept = torch.where(top_k > 0, top_k, vocab_size).clamp_(max=vocab_size).long()
    largest = torch.where(top_k > 0, kept, 1).max()
    values = logits.topk(int(largest), dim=1).values
    threshold = values.gather(1, torch.where(top_k > 0, kept, 1).unsqueeze(1) - 1)
    return logits.masked_fill((logits < threshold) & (top_k > 0).unsqueeze(1), float("-inf"))


def _launch(logits: Tensor, top_k: Tensor) -> Tensor:
    logits = logits.contiguous()
    out = torch.empty_like(logits)
    if len(logits):
        _top_k_kernel[(len(logits),)](logits, top_k, out, logits.shape[1], BLOCK=BLOCK, num_warps=NUM_WARPS)
    return out


@jit
def _top_k_kernel(logits, top_k, out, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    values = logits + row * size
    k = tl.load(top_k + row)
    threshold = tl.full([], float("-inf"), tl.float32)
    if (k > 0) & (k < size):
        largest = find_largest(values, size, BLOCK)
        threshold, _ = find_threshold(values, size, largest, k.to(tl.float32), False, BLOCK)
    keep_at_least(values, out + row * size, size, threshold, BLOCK)


OPERATION = SamplingOperation(
    "top_k",
    Stage.DISTRIBUTION,
    apply=lambda logits, rows, at: apply_top_k(logits, rows["top_k"][at.rows]),
    needed=lambda request: is_sampled(request) and bool(request.params.top_k),
    parameters=(
        Parameter(
            "top_k",
            Bounds(-1, math.inf, is_integer=True),
            "Draw from this many of the likeliest tokens; 0 is off.",
            fallback=0,
            minimum=0,
        ),
    ),
    columns=(Column("top_k", lambda request: min(request.params.top_k or 0, MAX_INT32)),),
)
