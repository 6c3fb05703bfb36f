from __future__ import annotations

import math

import pytest
import torch

from slipstream.sampling.check_logits import check_logits, find_maxima


def test_bad_rows_are_named_and_cleaned() -> None:
    rows = [[1.0, 2.0, 0.0], [1.0, math.nan, 0.0], [math.inf, 0.0, 1.0], [-math.inf] * 3, [-math.inf, 5.0, 0.0]]
    clean, failed = check_logits(torch.tensor(rows))
    assert failed.tolist() == [False, True, True, True, False]
    assert clean.tolist() == [rows[0], [1.0, -math.inf, 0.0], [-math.inf, 0.0, 1.0], rows[3], rows[4]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["native", "torch"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 70), (8, 50_000)])
def test_rows_of_any_size(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Ties go to the lowest id, and one NaN or infinity anywhere is enough."""
    logits = torch.randint(-5, 5, shape).to(dtype)
    largest, index, failed, any_failed = find_maxima(logits)
    assert not any_failed
    assert not failed.any()
    assert largest.tolist() == [max(row) for row in logits.tolist()]
    assert index.tolist() == [row.index(max(row)) for row in logits.tolist()]
    for bad in (float("nan"), float("inf")):
        spoilt = logits.clone()
        spoilt[-1, shape[1] // 2] = bad
        assert check_logits(spoilt)[1].tolist() == [False] * (shape[0] - 1) + [True]
