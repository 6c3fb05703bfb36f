"""Seeded Gumbel noise: adding it to logits and taking the argmax draws from their softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation, spec_of
from slipstream.sampling.philox import MASK, philox

# The third counter word says what noise is for, so that two uses at the same position are independent.
TARGET_NOISE = 0


def gumbel_noise(
    seeds: Tensor,  # [n, 2] int32: low and high word of the request's seed
    positions: Tensor,  # [n] int32: index of the token to be drawn
    choice: Tensor,  # [n] int32: which of a prompt's continuations
    vocab_size: int,
    purpose: int = TARGET_NOISE,
) -> Tensor:  # [n, vocab_size] float32
    """Noise of token t is word t % 4 of the Philox block with counter (t // 4, position, purpose, choice)."""
    blocks = torch.arange(-(-vocab_size // 4), device=seeds.device).unsqueeze(0)
    position = (positions.long() & MASK).unsqueeze(1)
    low, high = (seeds.long() & MASK).unsqueeze(2).unbind(1)
    words = philox((blocks, position, torch.full_like(position, purpose), choice.long().unsqueeze(1)), (low, high))
    bits = torch.stack(words, dim=-1).flatten(1)[:, :vocab_size]
    # With u small the exponential variable -log(1 - u) is small and the noise large: this tail keeps full precision.
    uniform = ((bits + 0.5) * 2.0**-32).float().clamp_(max=1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _shape(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, choice: Tensor) -> TensorSpec:
    return spec_of(logits)


@operation(_shape)
def add_gumbel(
    logits: Tensor,  # [n, vocab]
    temperature: Tensor,  # [n] float32; rows at 0 are greedy and get no noise
    seeds: Tensor,  # [n, 2] int32
    positions: Tensor,  # [n] int32
    choice: Tensor,  # [n] int32
) -> Tensor:
    noise = gumbel_noise(seeds, positions, choice, logits.shape[1])
    return logits + torch.where((temperature > 0).unsqueeze(1), noise, 0.0)
