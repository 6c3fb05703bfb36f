from __future__ import annotations

import math

import numpy as np
import torch

from slipstream.sampling.gumbel import add_gumbel, gumbel_noise


def seeds_of(*values: int) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.uint64).view(np.int32).reshape(-1, 2))


def test_noise_is_gumbel_distributed() -> None:
    noise = gumbel_noise(seeds_of(1, 2**63 + 5), torch.tensor([0, 9], dtype=torch.int32), 100_000).double()
    assert abs(noise.mean() - 0.5772156649) < 4 * (math.pi / math.sqrt(6)) / math.sqrt(noise.numel())
    # Kolmogorov-Smirnov against exp(-exp(-x)): 1.95 / sqrt(n) is the 0.1 % level.
    ordered = noise.flatten().sort().values
    expected = torch.exp(-torch.exp(-ordered))
    steps = torch.arange(1, len(ordered) + 1) / len(ordered)
    assert (expected - steps).abs().max() < 1.95 / math.sqrt(len(ordered))
    assert torch.isfinite(noise).all()


def test_noise_depends_on_seed_position_and_token_alone() -> None:
    alone = gumbel_noise(seeds_of(7), torch.tensor([5], dtype=torch.int32), 1000)
    together = gumbel_noise(seeds_of(1, 7, 7), torch.tensor([5, 5, 6], dtype=torch.int32), 2001)
    assert torch.equal(together[1, :1000], alone[0])
    assert not torch.equal(together[2, :1000], alone[0])
    assert not torch.equal(together[0, :1000], alone[0])


def test_positions_and_seeds_are_uncorrelated() -> None:
    n = 64
    noise = gumbel_noise(seeds_of(*[3] * n), torch.arange(n, dtype=torch.int32), 4096).double()
    other = gumbel_noise(seeds_of(*range(n)), torch.full((n,), 3, dtype=torch.int32), 4096).double()
    for rows in (noise, other):
        correlation = torch.corrcoef(rows) - torch.eye(n)
        assert correlation.abs().max() < 5.5 / math.sqrt(4096)


def test_purpose_gives_independent_noise() -> None:
    position = torch.tensor([5], dtype=torch.int32)
    first, second = (gumbel_noise(seeds_of(7), position, 50_000, purpose).double() for purpose in (0, 1))
    assert torch.corrcoef(torch.cat([first, second]))[0, 1].abs() < 5 / math.sqrt(50_000)


def test_argmax_draws_from_the_softmax() -> None:
    """Chi-square over many positions of one seed."""
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, -3.0, 0.5, 0.5])
    trials = 40_000
    noisy = add_gumbel(
        logits.repeat(trials, 1),
        torch.ones(trials),
        seeds_of(*[123456789] * trials),
        torch.arange(trials, dtype=torch.int32),
    )
    counts = torch.bincount(noisy.argmax(1), minlength=7).double()
    expected = logits.softmax(0).double() * trials
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 22.46  # 0.1 % level at six degrees of freedom


def test_greedy_rows_get_no_noise() -> None:
    logits = torch.randn(2, 50)
    out = add_gumbel(logits, torch.tensor([0.0, 0.7]), seeds_of(1, 1), torch.zeros(2, dtype=torch.int32))
    assert torch.equal(out[0], logits[0])
    assert not torch.equal(out[1], logits[1])
