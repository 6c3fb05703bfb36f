from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slipstream.train.repetition_filter import Ids, length_without_repetition


def as_ids(token_ids: list[int]) -> Ids:
    return np.array(token_ids, dtype=np.int32)


STORY = list(range(100, 160))  # sixty tokens, none twice


@pytest.mark.parametrize(
    ("token_ids", "kept"),
    [
        ([], 0),
        ([7], 1),
        (STORY, 60),
        ([7] * 48, 48),  # no more than is kept of a repetition
        ([7] * 49, 48),
        ([*STORY, *[7] * 200], 60 + 48),
        ([*STORY, *[1, 2, 3, 4, 5] * 30], 60 + 48),
        ([*STORY, *[1, 2, 3, 4, 5] * 30, 1, 2], 60 + 48),  # stopped in the middle of a round
        ([*STORY, *range(30), *range(30)], 120),  # two rounds of thirty
        ([*STORY, *range(30), *range(30), 0], 120),
        ([*range(64)] * 3, 128),
        ([*range(65)] * 3, 195),  # too long a period
        ([*[7] * 200, 8], 201),  # a repetition that the target left again
        ([*[7] * 100, *STORY], 160),
    ],
)
def test_by_hand(token_ids: list[int], kept: int) -> None:
    assert length_without_repetition(as_ids(token_ids)) == kept


def repetition_length(token_ids: list[int], period: int) -> int:
    """How many tokens at the end repeat with a period, one after another."""
    begin = len(token_ids)
    while begin > 0 and (begin + period > len(token_ids) or token_ids[begin - 1] == token_ids[begin - 1 + period]):
        begin -= 1
    return len(token_ids) - begin


@given(
    st.lists(st.integers(0, 3), max_size=120),
    st.lists(st.integers(0, 3), min_size=1, max_size=70),
    st.integers(0, 200),
)
@example([], [0], 49)
def test_the_cut_part_continues_the_repetition(story: list[int], rounds: list[int], num_repeated: int) -> None:
    token_ids = [*story, *(rounds * 200)[:num_repeated]]
    kept = length_without_repetition(as_ids(token_ids))
    too_long = {period: repetition_length(token_ids, period) - max(48, 2 * period) for period in range(1, 65)}
    if kept == len(token_ids):
        assert max(too_long.values()) <= 0
        return
    assert max(too_long.values()) == len(token_ids) - kept > 0
    # Continuing the rest with the same period restores the whole text.
    period = max(too_long, key=lambda one: too_long[one])
    again = token_ids[:kept]
    while len(again) < len(token_ids):
        again.append(again[-period])
    assert again == token_ids and max(48, 2 * period) <= kept


def test_many_answers_take_seconds() -> None:
    generator = np.random.default_rng(0)
    texts = [generator.integers(0, 50_000, 320, dtype=np.int32) for _ in range(1000)]
    began = time.process_time()
    assert all(length_without_repetition(text) == 320 for text in texts)
    assert 40 * (time.process_time() - began) < 15, "seconds for forty thousand, on a slow machine that others use"
