"""Cross entropy between the target's distribution and the head's, over the draft vocabulary.

Logits take memory of tokens times vocabulary for every draft step. They are computed a chunk at a time, together with
their gradients, so that none has to be kept for the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.training.entropy_grads import entropy_grads

_CHUNK = 8192  # rows at a time


def target_distribution(normed: Tensor, head: Tensor) -> Tensor:
    """[n, draft_vocab]: the target's probabilities, renormalised over the tokens that can be drafted.

    ``normed`` [n, hidden] is the input of its logits, ``head`` [draft_vocab, hidden] their weight.
    """
    # torch sums in float32 whatever the type
    with torch.no_grad(), torch.autocast(normed.device.type, enabled=False):
        return torch.cat([(chunk @ head.T).softmax(dim=-1) for chunk in torch.split(normed, _CHUNK)])


def soft_cross_entropy(states: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Mean over n of the cross entropy of softmax(states @ weight.T) against ``target``; the weight may be frozen.

    ``states`` [n, hidden] are normed, ``weight`` is [draft_vocab, hidden], ``target`` [n, draft_vocab].
    """
    loss: Tensor = _SoftCrossEntropy.apply(states, weight, target)  # type: ignore[no-untyped-call]
    return loss


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        wide = torch.promote_types(target.dtype, torch.float32)
        matrix, rows = weight.to(target.dtype), max(1, states.shape[0])
        loss = torch.zeros((), dtype=wide, device=states.device)
        state_grads = torch.empty_like(states)
        weight_grad = torch.zeros_like(weight) if weight.requires_grad else None
        for start in range(0, states.shape[0], _CHUNK):
            part = slice(start, start + _CHUNK)
            inputs, expected = states[part].to(target.dtype), target[part]
            grads = inputs @ matrix.T
            loss += entropy_grads(grads, expected).sum()
            state_grads[part] = grads @ matrix
            if weight_grad is not None:
                weight_grad += grads.T @ inputs
        # Divided after the products, which are smaller than the gradients of the logits.
        ctx.save_for_backward(state_grads.div_(rows), None if weight_grad is None else weight_grad.div_(rows))
        return loss / rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        state_grads, weight_grad = ctx.saved_tensors
        own = None if weight_grad is None else weight_grad * grads[0].to(weight_grad.dtype)
        return state_grads * grads[0].to(state_grads.dtype), own, None
