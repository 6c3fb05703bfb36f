"""The definition of a draw. Its kernel is held to it in test_triton.py."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from slipstream.sampling.draw import draw_tokens
from slipstream.sampling.gumbel import gumbel_noise
from tests.sampling.test_gumbel import seeds_of


def draw(logits: Tensor, temperature: list[float], noise: bool = True, scaled: bool = False) -> tuple[Tensor, Tensor]:
    """Row i of the logits is drawn for request row i, at position i."""
    n = len(logits)
    order = torch.arange(n, dtype=torch.int32)
    return draw_tokens(
        logits,
        order,
        torch.tensor(temperature),
        seeds_of(*[123456789] * n),
        order,
        torch.zeros_like(order),
        noise,
        scaled,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["native", "torch"])
def test_ties_go_to_the_lowest_id_and_bad_rows_stay_inside_the_vocabulary(dtype: torch.dtype) -> None:
    rows = [[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [1.0, math.nan, 0.0], [math.inf, 0.0, 1.0], [-math.inf] * 3]
    for noise in (False, True):
        token_ids, failed = draw(torch.tensor(rows, dtype=dtype), [0.0] * 5, noise)
        assert token_ids.tolist() == [1, 0, 0, 2, 0]
        assert failed.tolist() == [False, False, True, True, True]
    assert draw(torch.tensor(rows, dtype=dtype), [1.0] * 5)[0].tolist()[-1] == 0


def test_the_argmax_with_noise_draws_from_the_softmax() -> None:
    """Chi-square over many positions of one seed."""
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, -3.0, 0.5, 0.5])
    trials = 40_000
    for scaled in (False, True):
        token_ids, failed = draw(logits.repeat(trials, 1), [0.8] * trials, scaled=scaled)
        assert not failed.any()
        counts = torch.bincount(token_ids, minlength=7).double()
        expected = (logits / (1.0 if scaled else 0.8)).softmax(0).double() * trials
        chi_square = ((counts - expected) ** 2 / expected).sum()
        assert chi_square < 22.46  # 0.1 % level at six degrees of freedom


def test_greedy_rows_get_no_noise() -> None:
    logits = 1e-3 * torch.randn(200, 50)
    token_ids, _ = draw(logits, [0.0, 0.7] * 100)
    assert torch.equal(token_ids[::2], logits[::2].argmax(1))
    assert not torch.equal(token_ids[1::2], logits[1::2].argmax(1))


def test_rows_are_read_through_the_batch() -> None:
    """Two logits rows for three request rows, in another order."""
    logits, rows = torch.zeros(2, 100), torch.tensor([2, 0], dtype=torch.int32)
    seeds, position = seeds_of(5, 6, 2**64 - 7), torch.tensor([9, 2**31 - 1], dtype=torch.int32)
    choice = torch.tensor([0, 1, 2], dtype=torch.int32)
    token_ids, _ = draw_tokens(logits, rows, torch.ones(3), seeds, position, choice, noise=True, scaled=False)
    assert token_ids.tolist() == gumbel_noise(seeds[[2, 0]], position, choice[[2, 0]], 100).argmax(1).tolist()


def test_a_tiny_temperature_is_greedy_and_no_failure() -> None:
    logits = torch.tensor([[5.0, 20.0, -3.0]])
    token_ids, failed = draw(logits, [1e-44])
    assert token_ids.tolist() == [1]
    assert failed.tolist() == [False]
