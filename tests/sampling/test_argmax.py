from __future__ import annotations

import math

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
