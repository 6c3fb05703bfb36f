from __future__ import annotations

import math

import pytest
import torch

from slipstream.sampling.argmax import argmax, check_logits


def test_ties_go_to_the_lowest_id() -> None:
    assert argmax(torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]])).tolist() == [1, 0]


def test_bad_rows_are_named_and_stay_inside_the_vocabulary() -> None:
    rows = [[1.0, 2.0, 0.0], [1.0, math.nan, 0.0], [math.inf, 0.0, 1.0], [-math.inf] * 3, [-math.inf, 5.0, 0.0]]
    clean, failed = check_logits(torch.tensor(rows))
    assert failed.tolist() == [False, True, True, True, False]
    assert not torch.isnan(clean).any()
    assert argmax(clean).tolist() == [1, 0, 2, 0, 1]


@pytest.mark.parametrize("shape", [(1, 1), (3, 70), (8, 50_000)])
def test_float32_rows_of_any_size(shape: tuple[int, int]) -> None:
    """Where the C kernel serves: ties go to the lowest id, and one NaN or infinity anywhere is enough."""
    logits = torch.randint(-5, 5, shape).float()
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert argmax(logits).tolist() == expected
    for bad in (float("nan"), float("inf")):
        spoilt = logits.clone()
        spoilt[-1, shape[1] // 2] = bad
        assert check_logits(spoilt)[1].tolist() == [False] * (shape[0] - 1) + [True]
