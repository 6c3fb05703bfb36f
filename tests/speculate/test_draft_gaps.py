"""Where a drafter's keys begin, against a loop over the life of a row."""

from __future__ import annotations

import random

import pytest
import torch

from slipstream.speculate.draft_gaps import mark_gaps
from tests.bundles import make_rows


@pytest.mark.parametrize("goes_over_all", [True, False])
def test_keys_begin_behind_the_last_step_that_made_no_drafts(goes_over_all: bool) -> None:
    rng = random.Random(1)
    for _ in range(200):
        # Row 0 is a neighbour that must stay as it is, row 2 scratch.
        start, end = torch.tensor([5, 0, 0]).int(), torch.tensor([9, 0, 0]).int()
        seq_starts, first_slots = torch.zeros(2).int(), torch.zeros(2).int()
        has_keys: list[bool] = []  # of every position, whether the drafter's keys are right there
        computed = 0
        for _ in range(12):
            num_new, drafts = rng.randint(1, 5), rng.random() < 0.6
            first, computed = computed, computed + num_new
            has_keys += [drafts] * num_new
            if not drafts:
                continue
            rows = torch.tensor([1, 2]).int()
            num_computed, step_start = torch.tensor([0, computed, 0]).int(), torch.tensor([0, first + 1, 0]).int()
            state = make_rows(num_computed=num_computed, step_start=step_start, draft_start=start, draft_end=end)
            mark_gaps(rows, state, goes_over_all, 0, seq_starts, first_slots)
            found = int(seq_starts[0])
            assert found == start[1]
            assert 0 <= found < computed
            if goes_over_all:
                assert found == len(has_keys) - 1 - has_keys[::-1].index(False) + 1 if False in has_keys else found == 0
            elif False in has_keys[:-num_new]:
                # A pass over the last two tokens alone: what an earlier step has left out stays out.
                assert found > len(has_keys[:-num_new]) - 1 - has_keys[:-num_new][::-1].index(False)
            assert all(has_keys[found:computed])
        assert (start[0], end[0], start[2], end[2], seq_starts[1]) == (5, 9, 0, 0, 0)


@pytest.mark.parametrize("num_caught_up", [0, 1, 4, 20])
def test_a_pass_goes_back_over_what_was_missed_as_far_as_there_is_room(num_caught_up: int) -> None:
    rng = random.Random(2)
    for _ in range(200):
        ended, missed, num_new = rng.randint(1, 9), rng.randint(0, 12), rng.randint(1, 4)
        first, computed = ended + missed, ended + missed + num_new
        start, end = torch.tensor([1]).int(), torch.tensor([ended]).int()
        seq_starts, first_slots = torch.tensor([-9]).int(), torch.tensor([-9]).int()
        num_computed, step_start = torch.tensor([computed]).int(), torch.tensor([first + 1]).int()
        state = make_rows(num_computed=num_computed, step_start=step_start, draft_start=start, draft_end=end)
        mark_gaps(torch.tensor([0]).int(), state, False, num_caught_up, seq_starts, first_slots)
        assert int(end) == computed
        begins = max(ended, computed - 1 - num_caught_up)
        assert int(first_slots) == (begins if missed else -1)
        closed = not missed or begins == ended
        assert int(seq_starts) == int(start) == (1 if closed else begins)


def test_a_row_that_did_not_run_keeps_what_it_has() -> None:
    start, end = torch.tensor([3]).int(), torch.tensor([7]).int()
    seq_starts, first_slots = torch.tensor([-9]).int(), torch.tensor([-9]).int()
    num_computed, step_start = torch.tensor([20]).int(), torch.tensor([0]).int()
    state = make_rows(num_computed=num_computed, step_start=step_start, draft_start=start, draft_end=end)
    mark_gaps(torch.tensor([0]).int(), state, True, 0, seq_starts, first_slots)
    assert (int(start), int(end), int(seq_starts), int(first_slots)) == (3, 7, 3, -1)
