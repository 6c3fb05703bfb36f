from __future__ import annotations

import pytest

from slipstream.scheduler.step_costs import StepCosts


def test_a_batch_costs_what_the_graph_costs_that_it_is_padded_to() -> None:
    costs = StepCosts(in_graphs=True)
    assert costs.seconds(1, 0) is None
    for size, seconds in ((8, 3.0), (1, 1.0), (2, 1.5)):
        costs.record(size, 0, seconds)
    assert [costs.seconds(n, 0) for n in (1, 2, 3, 8)] == [1.0, 1.5, 3.0, 3.0]
    assert costs.seconds(9, 0) is None, "no graph would take it"
    assert costs.seconds(1, 3) is None
    costs.record(1, 0, 1.25)
    assert costs.seconds(1, 0) == 1.25
    assert costs.version == 4


def test_without_graphs_the_number_of_tokens_counts() -> None:
    costs = StepCosts(in_graphs=False)
    costs.record(1, 0, 1.0)
    assert costs.seconds(4, 1) is None, "one point is no line"
    costs.record(1, 3, 1.6)
    costs.record(1, 7, 2.0)
    assert costs.seconds(2, 0) == pytest.approx(1.2)
    assert costs.seconds(3, 1) == pytest.approx(1.8)  # six tokens
    assert costs.seconds(8, 1) == pytest.approx(2.8)  # sixteen
    costs.record(8, 1, 4.0)
    assert costs.seconds(8, 1) == 4.0
    assert costs.seconds(5, 1) == 4.0, "what was measured counts, if only for more requests"


def test_a_step_that_was_held_up_costs_no_more_than_a_longer_one() -> None:
    costs = StepCosts(in_graphs=False)
    for num_drafts, seconds in enumerate([4.3, 5.2, 11.1, 7.3]):
        costs.record(1, num_drafts, seconds)
    assert [costs.seconds(1, k) for k in range(4)] == [4.3, 5.2, 7.3, 7.3]


def test_noise_in_the_measurements_gives_no_free_steps() -> None:
    costs = StepCosts(in_graphs=False)
    costs.record(1, 0, 1.0)
    costs.record(1, 1, 0.5)
    assert costs.seconds(64, 1) == 0.5
