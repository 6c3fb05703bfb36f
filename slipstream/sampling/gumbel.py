"""Seeded Gumbel noise: adding it to logits and taking the argmax draws from their softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.triton_jit import jit, tl
from slipstream.sampling.philox import MASK, philox

# The third counter word is the purpose of the noise, so that two uses at the same position are independent.
TARGET_NOISE = 0


def gumbel_noise(
    seeds: Tensor,  # [n, 2] int32: low and high word of the request's seed
    positions: Tensor,  # [n] int32: index of the token to be drawn
    choice: Tensor,  # [n] int32: which of a prompt's continuations
    vocab_size: int,
    purpose: int = TARGET_NOISE,
) -> Tensor:  # [n, vocab_size] float32
    """Noise of token t is word t % 4 of the Philox block with counter (t // 4, position, purpose, choice)."""
    outputs = _philox_blocks(seeds, positions, choice, torch.arange(-(-vocab_size // 4), device=seeds.device), purpose)
    return _gumbel(torch.stack(outputs, dim=-1).flatten(1)[:, :vocab_size])


def gumbel_noise_at(
    seeds: Tensor,  # [n, 2] int32
    positions: Tensor,  # [n] int32
    choice: Tensor,  # [n] int32
    token_ids: Tensor,  # [m] int32
    purpose: int = TARGET_NOISE,
) -> Tensor:  # [n, m] float32
    """The noise of these tokens only, independent of the size of their vocabulary."""
    word0, word1, word2, word3 = _philox_blocks(seeds, positions, choice, token_ids.long() // 4, purpose)
    within = token_ids % 4
    low, high = torch.where(within == 0, word0, word1), torch.where(within == 2, word2, word3)
    return _gumbel(torch.where(within < 2, low, high))


def _philox_blocks(
    seeds: Tensor, positions: Tensor, choice: Tensor, blocks: Tensor, purpose: int
) -> tuple[Tensor, ...]:
    """All four outputs of these Philox blocks, [n, num_blocks] each."""
    position = (positions.long() & MASK).unsqueeze(1)
    low, high = (seeds.long() & MASK).unsqueeze(2).unbind(1)
    counter = (blocks.unsqueeze(0), position, torch.full_like(position, purpose), choice.long().unsqueeze(1))
    return philox(counter, (low, high))


def _gumbel(bits: Tensor) -> Tensor:
    # With u small the exponential variable -log(1 - u) is small and the noise large: this tail keeps full precision.
    uniform = ((bits + 0.5) * 2.0**-32).float().clamp_(max=1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


@jit
def gumbel_block(seeds, position, choice, first_token, PURPOSE: tl.constexpr, BLOCK: tl.constexpr):
    """The same noise in a kernel, for BLOCK tokens from a multiple of four; ``seeds`` points to a seed's two halves."""
    quad = first_token // 4 + tl.arange(0, BLOCK // 4)
    word0, word1, word2, word3 = tl.philox(_key(seeds), quad, position, PURPOSE, choice)
    return _gumbel_of(tl.interleave(tl.interleave(word0, word2), tl.interleave(word1, word3)))


@jit
def gumbel_at(seeds, position, choice, ids, PURPOSE: tl.constexpr):
    """The same noise of arbitrary tokens. Each computes a whole Philox block, even where neighbours share it."""
    word0, word1, word2, word3 = tl.philox(_key(seeds), ids // 4, position, PURPOSE, choice)
    within = ids % 4
    low, high = tl.where(within == 0, word0, word1), tl.where(within == 2, word2, word3)
    return _gumbel_of(tl.where(within < 2, low, high))


@jit
def _key(seeds):
    low = tl.load(seeds).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(seeds + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    return (high << 32) | low


@jit
def _gumbel_of(bits):
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * (1.0 / 4294967296.0), 1.0 - 1.0 / 16777216.0)
    # There is no log1p, and 1 - u loses most digits of a small u. The next term of the series is below float32.
    u = uniform
    series = 1.0 / 4 + u * (1.0 / 5 + u * (1.0 / 6 + u * (1.0 / 7)))
    series = u * (1.0 + u * (1.0 / 2 + u * (1.0 / 3 + u * series)))
    return -tl.log(tl.where(u < 0.0625, series, -tl.log(1.0 - u)))
