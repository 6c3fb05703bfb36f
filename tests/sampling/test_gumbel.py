from __future__ import annotations

import math

import numpy as np
import torch

from slipstream.sampling.gumbel import gumbel_noise


def noise_of(
    seeds: list[int], positions: list[int], vocab_size: int, purpose: int = 0, choice: int = 0
) -> torch.Tensor:
    choices = torch.full((len(seeds),), choice, dtype=torch.int32)
    position = torch.tensor(positions, dtype=torch.int32)
    return gumbel_noise(seeds_of(*seeds), position, choices, vocab_size, purpose)


def seeds_of(*values: int) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.uint64).view(np.int32).reshape(-1, 2))


def test_noise_is_gumbel_distributed() -> None:
    noise = noise_of([1, 2**63 + 5], [0, 9], 100_000).double()
    assert abs(noise.mean() - 0.5772156649) < 4 * (math.pi / math.sqrt(6)) / math.sqrt(noise.numel())
    # Kolmogorov-Smirnov against exp(-exp(-x)): 1.95 / sqrt(n) is the 0.1 % level.
    ordered = noise.flatten().sort().values
    expected = torch.exp(-torch.exp(-ordered))
    steps = torch.arange(1, len(ordered) + 1) / len(ordered)
    assert (expected - steps).abs().max() < 1.95 / math.sqrt(len(ordered))
    assert torch.isfinite(noise).all()


def test_noise_depends_on_seed_position_and_token_alone() -> None:
    alone = noise_of([7], [5], 1000)
    together = noise_of([1, 7, 7], [5, 5, 6], 2001)
    assert torch.equal(together[1, :1000], alone[0])
    assert not torch.equal(together[2, :1000], alone[0])
    assert not torch.equal(together[0, :1000], alone[0])


def test_positions_and_seeds_are_uncorrelated() -> None:
    n = 64
    noise = noise_of([3] * n, list(range(n)), 4096).double()
    other = noise_of(list(range(n)), [3] * n, 4096).double()
    for rows in (noise, other):
        correlation = torch.corrcoef(rows) - torch.eye(n)
        assert correlation.abs().max() < 5.5 / math.sqrt(4096)


def test_purpose_and_choice_give_independent_noise() -> None:
    kinds = [noise_of([7], [5], 50_000, purpose, choice).double() for purpose in (0, 1) for choice in (0, 1)]
    correlation = torch.corrcoef(torch.cat(kinds)) - torch.eye(4)
    assert correlation.abs().max() < 5 / math.sqrt(50_000)
