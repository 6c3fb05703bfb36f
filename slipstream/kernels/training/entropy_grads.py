"""Cross entropy against given probabilities together with its gradients: logits are read twice, not ten times."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation
from slipstream.kernels.triton_jit import jit, next_power_of_2, runs_triton, tl

_BLOCK = 4096  # columns per block


@operation(
    lambda logits: TensorSpec((logits.shape[0],), torch.promote_types(logits.dtype, torch.float32)), writes=("logits",)
)
def entropy_grads(
    logits: Tensor,  # [n, vocab]; afterwards the gradients of each row's loss
    target: Tensor,  # [n, vocab], rows sum up to 1
) -> Tensor:  # [n] losses, in float32 at least
    if runs_triton(logits):
        assert logits.is_contiguous() and target.is_contiguous()
        num_rows, vocab_size = logits.shape
        losses = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
        block = min(_BLOCK, next_power_of_2(vocab_size))
        _entropy_kernel[(num_rows,)](logits, target, losses, vocab_size, BLOCK=block, num_warps=max(1, block // 512))
        return losses
    log_probs = logits.log_softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    losses = -(target * log_probs).sum(dim=-1)
    logits.copy_(log_probs.exp_().sub_(target))
    return losses


@jit
def _entropy_kernel(logits, target, losses, vocab_size, BLOCK: tl.constexpr):
    """One program per row: one pass for the sums, one for the gradients."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    logits += row * vocab_size
    target += row * vocab_size
    peaks, masses = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        exists = start + column < vocab_size
        x = tl.load(logits + start + column, mask=exists, other=float("-inf")).to(tl.float32)
        w = tl.load(target + start + column, mask=exists, other=0.0).to(tl.float32)
        higher = tl.maximum(peaks, x)
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        masses = masses * tl.exp(peaks - anchor) + tl.exp(x - anchor)
        peaks = higher
        weighted += tl.where(w > 0.0, w * x, 0.0)
        total += w
    peak = tl.max(peaks, 0)
    log_sum = peak + tl.log(tl.sum(masses * tl.exp(peaks - peak), 0))
    tl.store(losses + row, tl.sum(total, 0) * log_sum - tl.sum(weighted, 0))
    for start in range(0, vocab_size, BLOCK):
        exists = start + column < vocab_size
        x = tl.load(logits + start + column, mask=exists, other=float("-inf")).to(tl.float32)
        w = tl.load(target + start + column, mask=exists, other=0.0).to(tl.float32)
        tl.store(logits + start + column, (tl.exp(x - log_sum) - w).to(logits.dtype.element_ty), mask=exists)
