"""What is learnt of drafts: one request after the other and all at once are the same, and by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.scheduler import acceptance
from slipstream.scheduler.acceptance import Acceptance, Judged

MOST = 5


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, MOST), st.lists(st.integers(0, MOST), min_size=3, max_size=3)), min_size=1, max_size=60
    )
)
def test_one_by_one_is_all_at_once(steps: list[tuple[int, list[int]]]) -> None:
    few, many = Acceptance(4, MOST), Acceptance(4, MOST)
    rows = np.array([2, 0, 3])
    for num_drafts, accepted in steps:
        counts = np.minimum(np.array(accepted), num_drafts)
        with pytest.MonkeyPatch.context() as patch:
            few.learn(rows, counts, num_drafts)
            patch.setattr(acceptance, "_FEW", 0)
            many.learn(rows, counts, num_drafts)
    np.testing.assert_allclose(few.right, many.right, rtol=1e-12)
    np.testing.assert_allclose(few._num_seen, many._num_seen, rtol=1e-12)
    np.testing.assert_allclose(few.usual, many.usual, rtol=1e-12)
    assert np.array_equal(few.num_failed, many.num_failed)


def test_by_hand() -> None:
    known = Acceptance(2, 2)
    known.move_in(0)
    known.learn(np.array([0]), np.array([1]), 2)
    # 0.7 of eight trials, and one more: the first draft was accepted, the second was not.
    assert known.right[0].tolist() == pytest.approx([0.7 + 0.3 / 9, 0.7 - 0.7 / 9])
    assert known.usual.tolist() == pytest.approx([0.7 + 0.3 / 32, 0.7 - 0.7 / 32])
    assert known.tokens(np.array([0])) == pytest.approx([1, 1.7333, 1.7333 + 0.7333 * 0.6222], abs=1e-3)


def test_a_draft_behind_a_wrong_one_says_nothing() -> None:
    known = Acceptance(1, 3)
    known.learn(np.array([0]), np.array([0]), 3)
    assert known.right[0, 0] < 0.7 and known.right[0, 1:].tolist() == [0.7, 0.7]
    assert known.usual[1:].tolist() == [0.7, 0.7]


def test_rehearsed_drafts_of_some_count_for_their_batch() -> None:
    """A row that is judged in every fourth step forgets four times as much; positions judged before do not count."""
    often, rarely = Acceptance(1, 3), Acceptance(1, 3)
    for known in (often, rarely):
        for _ in range(100):
            known.learn(np.array([0]), np.array([3]), 3)
        known.right[:] = 0.5
    said, right = [Judged(0, 1, 1, 2)], often.right[0].copy()
    often.learn_rehearsed(said, 1)
    rarely.learn_rehearsed(said, 4)
    assert often.right[0, 0] == rarely.right[0, 0] == right[0], "it was judged before"
    assert often.right[0, 1] == pytest.approx(right[2] * 31 / 32)
    assert rarely.right[0, 1] == pytest.approx(right[2] * 8 / 9)


def test_what_was_distrusted_is_soon_outweighed() -> None:
    known = Acceptance(2, 3)
    rows = np.array([0, 1])
    for _ in range(50):
        known.learn(rows, np.array([3, 3]), 3)
    known.distrust(rows, slice(1, 3), 0.0)
    known.learn(rows, np.array([1, 1]), 3)
    assert known.right[0, 1] == pytest.approx(0.5, abs=0.01) and known.right[0, 0] > 0.99


@pytest.mark.parametrize("num_reqs", [1, 6], ids=["one by one", "all at once"])
def test_a_row_that_changes_hands_forgets_the_failures_of_its_last_request(num_reqs: int) -> None:
    """Many in a row make what was known count less; those of another request say nothing of this one's text."""
    rows, failed = np.arange(num_reqs), np.zeros(num_reqs, dtype=np.int64)
    known, fresh = Acceptance(num_reqs, 2), Acceptance(num_reqs, 2)
    for _ in range(20):
        known.learn(rows, failed, 1)
    known.usual[:] = fresh.usual
    for row in rows.tolist():
        known.move_in(row)
        fresh.move_in(row)
    for each in (known, fresh):
        each.learn(rows, failed, 1)
    np.testing.assert_allclose(known.right, fresh.right, rtol=1e-12)
