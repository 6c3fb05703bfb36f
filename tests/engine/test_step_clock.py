"""The time of steps as the host sees it: launches and results at known times."""

from __future__ import annotations

import pytest

from slipstream.engine.step_clock import StepClock


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("slipstream.engine.step_clock.time.monotonic", made)
    return made


def test_alone_a_step_takes_from_its_launch_to_its_results(clock: Clock) -> None:
    steps = StepClock(1)
    clock.now = 5.0
    steps.launching(0)
    clock.now = 5.25
    assert steps.collected(0, wait_s=0.0) == 0.25


def test_in_flight_a_step_begins_where_the_one_before_ends(clock: Clock) -> None:
    steps = StepClock(2)
    found = []
    # Launched, collected, and how long the host waited: it comes late to the end of step 2, and step 4 finds an idle
    # device.
    for step_id, (launched, collected, wait_s) in enumerate(
        [(0.0, 1.0, 0.9), (0.1, 1.5, 0.4), (1.1, 4.0, 0.0), (1.6, 4.5, 0.5), (6.0, 6.75, 0.7)]
    ):
        clock.now = launched
        steps.launching(step_id)
        clock.now = collected
        found.append(steps.collected(step_id, wait_s))
    assert found == [None, 0.5, None, None, 0.75]


def test_after_a_step_in_two_halves_nothing_is_known_of_the_next(clock: Clock) -> None:
    steps = StepClock(2)
    for step_id in range(3):
        steps.launching(step_id)
    clock.now = 1.0
    assert steps.collected(0, 0.5) is None
    steps.forget(1)
    clock.now = 2.0
    assert steps.collected(2, 0.5) is None
