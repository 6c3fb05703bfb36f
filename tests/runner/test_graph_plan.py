"""Which graphs there are, and when each is recorded: no device is needed to decide."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from slipstream.graphs.descriptor import BatchExecutionDescriptor
from slipstream.graphs.mode import CUDAGraphMode
from slipstream.runner.graph_plan import AT_START, FIRST, LAST, SECOND, THIRD, GraphPlan

M = CUDAGraphMode


def same_number(num_checked: int) -> int:
    return num_checked


def always(most: int) -> Callable[[int], int]:
    """A step that proposes drafts proposes all of them, however many the next one checks."""
    return lambda num_checked: most if num_checked else 0


@pytest.mark.parametrize(
    ("lengths", "initial", "proposes_most", "mixed"),
    [
        ((0,), 0, False, [0]),
        ((3,), 3, False, [3]),
        ((0, 1, 2, 3, 5), 3, False, [0, 3]),
        ((0, 1), 1, False, [0, 1]),
        ((0, 1, 2, 3, 5), 3, True, [0, 5]),
    ],
)
def test_mixed_batches_have_graphs_for_the_drafts_that_are_proposed_after_them(
    lengths: tuple[int, ...], initial: int, proposes_most: bool, mixed: list[int]
) -> None:
    plan = GraphPlan(lengths, initial, num_proposed=always(max(lengths)) if proposes_most else same_number)
    found = [kind for kind in plan.kinds() if kind.query_len is None and kind.tier == "fast"]
    assert [kind.num_drafts for kind in found] == mixed
    # Only those with as many as the first steps propose are there before the first step.
    orders = {k: plan.order(BatchExecutionDescriptor(M.FULL, 64, 8, None, "fast", k), 8) for k in mixed}
    assert [k for k, order in orders.items() if order == AT_START] == mixed[-1:]


@pytest.mark.parametrize("checks_trials", [False, True])
def test_a_step_after_a_trial_has_a_graph_where_it_checks_the_draft(checks_trials: bool) -> None:
    fast = [kind for kind in GraphPlan((0, 1, 2), 2, checks_trials).kinds() if kind.tier == "fast"]
    kinds = {(kind.query_len, kind.num_drafts) for kind in fast}
    assert {(1, 0), (2, 1), (3, 2), (1, 1), (2, 2), (3, 1)} <= kinds
    assert ((2, 0) in kinds) is checks_trials


def test_where_every_step_proposes_all_drafts_every_change_of_the_length_has_a_graph() -> None:
    """No draft is checked that was not proposed, and going from one length to another takes whole graphs only."""
    lengths = (0, 1, 2, 5)
    plan = GraphPlan(lengths, 2, False, always(5))
    kinds = {(kind.query_len, kind.num_drafts) for kind in plan.kinds() if kind.tier == "fast"}
    assert kinds == {(1, 0), (1, 5), (2, 5), (3, 5), (6, 5), (None, 0), (None, 5)}
    for before, after in itertools.permutations(lengths, 2):
        proposed_before, proposed_after = plan.num_proposed(before), plan.num_proposed(after)
        steps = [(before, proposed_before), (before, proposed_after), (after, proposed_after)]
        if not after:
            steps.pop(1)  # what was proposed is left unchecked
        assert {(1 + checked, proposed) for checked, proposed in steps} <= kinds


def orders_of(plan: GraphPlan, size: int) -> dict[tuple[int, int], int | None]:
    """By drafts that are checked and proposed."""
    found = {}
    for query_len, tier, proposed in plan.kinds():
        if query_len is not None and tier == "fast":
            shape = (size * query_len, size, query_len, tier, proposed)
            found[query_len - 1, proposed] = plan.order(BatchExecutionDescriptor(M.FULL, *shape), 256)
    return found


@pytest.mark.parametrize("proposes_most", [False, True])
def test_every_graph_that_is_recorded_has_the_steps_before_and_after_it(proposes_most: bool) -> None:
    """A length without a graph for its steps has no cost and is never chosen."""
    plan = GraphPlan((0, 1, 2, 3, 5, 7), 5, False, always(7) if proposes_most else same_number)
    powers = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    recorded = {(size, *key) for size in powers for key, order in orders_of(plan, size).items() if order is not None}
    for size, checked, proposed in recorded:
        assert (size, checked, plan.num_proposed(checked)) in recorded
        assert proposes_most or (size, proposed, proposed) in recorded
    of_eight, of_24 = orders_of(plan, 8), orders_of(plan, 24)
    if proposes_most:
        assert {(64, 7, 7), (64, 5, 7), (128, 3, 7), (256, 0, 7), (256, 5, 7), (256, 1, 7)} <= recorded
        assert not {(128, 7, 7), (256, 2, 7), (256, 3, 7)} & recorded
        assert {key for key, order in of_eight.items() if order == AT_START} == {(5, 7)}
        assert {key for key, order in of_eight.items() if order == FIRST} == {(0, 0), (0, 7)}
        assert {key for key, order in of_eight.items() if order == SECOND} == {(1, 7), (2, 7), (3, 7), (7, 7)}
        assert of_24[0, 7] == LAST and of_24[7, 7] is None
        return
    assert {(64, 0, 1), (64, 5, 7), (256, 0, 1)} <= recorded
    assert not {(128, 5, 7), (256, 1, 2), (256, 3, 5)} & recorded
    # The lengths themselves come before the steps between them, but for the shortest, which trials use.
    assert of_eight[5, 5] == AT_START and of_eight[0, 0] == of_eight[0, 1] == FIRST and of_eight[7, 7] == SECOND
    assert of_eight[1, 2] == of_eight[5, 7] == of_eight[7, 5] == THIRD
    assert of_24[0, 1] == LAST and of_24[1, 2] is None


def test_a_graph_gives_a_cost_where_its_step_can_follow_itself() -> None:
    steady = BatchExecutionDescriptor(M.FULL, 12, 4, 3, "fast", 2)
    plan = GraphPlan((0, 1, 2), 2)
    assert plan.gives_cost(steady)
    others = {"query_len": None, "tier": "full", "num_drafts": 1, "mode": M.PIECEWISE}
    assert not any(plan.gives_cost(replace(steady, **{name: value})) for name, value in others.items())
    # Where every step proposes three, a step that checks one still proposes three.
    plan = GraphPlan((0, 1, 3), 1, num_proposed=always(3))
    assert plan.gives_cost(BatchExecutionDescriptor(M.FULL, 8, 4, 2, "fast", 3))
    assert not plan.gives_cost(BatchExecutionDescriptor(M.FULL, 8, 4, 2, "fast", 1))


def test_launched_steps_are_timed_for_powers_of_two_up_to_a_small_batch() -> None:
    plan = GraphPlan((0, 2), 2)
    assert plan.launched_steps(6) == [(1, 0), (1, 2), (2, 0), (2, 2), (4, 0), (4, 2)]
    assert max(plan.launched_steps(1000)) == (16, 2)
