"""Pages that all of a step begin with. ``Device`` holds every plan of the scheduler's other tests to the truth."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slipstream.plan import StepPlan
from slipstream.scheduler.cascade import MAX_TOKENS
from slipstream.scheduler.common_pages import count_common_pages
from slipstream.scheduler.request_state import RequestState
from slipstream.scheduler.scheduler import Scheduler
from tests.scheduler.test_scheduler import Device, make, request, simulate

STEM = list(range(10, 22))  # three pages of four


def states(*pages: list[int]) -> list[RequestState]:
    made = [RequestState(request(f"r{i}", 4), i, []) for i in range(len(pages))]
    for state, page_ids in zip(made, pages, strict=True):
        state.page_ids, state.num_remembered_pages = page_ids, len(page_ids)
    return made


@pytest.mark.parametrize(
    ("pages", "num_common"),
    [
        (([1, 2, 3],), 0),
        (([1, 2, 3], [1, 2, 4]), 2),
        (([1, 2, 3], [1, 2]), 2),
        (([1, 2], [1, 2, 3, 4], [1, 2, 5]), 2),
        (([1, 2, 3], [1, 2, 3, 4], [1, 5]), 1),
        (([1, 2, 3], [1, 2, 3, 4], [5]), 0),
        (([1, 2, 3], [4, 2, 3]), 0),
    ],
)
def test_as_many_as_all_have(pages: tuple[list[int], ...], num_common: int) -> None:
    assert count_common_pages(states(*pages), len(pages), 4, 1) == num_common


def test_none_where_reading_them_once_does_not_pay() -> None:
    batch = states([1, 2, 3], [1, 2, 4], [1, 2])  # two requests are spared two pages of four
    assert count_common_pages(batch, 3, 4, 16) == 2
    assert count_common_pages(batch, 3, 4, 17) == 0
    assert count_common_pages(batch, 3, 4, None) == 0
    assert count_common_pages(batch, MAX_TOKENS + 1, 4, 1) == 0


def test_a_common_page_that_is_not_filled_is_a_fault() -> None:
    batch = states([1, 2, 3], [1, 2, 4])
    batch[1].num_remembered_pages = 1
    with pytest.raises(AssertionError, match="not filled"):
        count_common_pages(batch, 2, 4, 1)


def started(scheduler: Scheduler, device: Device) -> StepPlan:
    """One request has computed the stem and runs, two more find it."""
    scheduler.add(request("a", [*STEM, 1], 20))
    for _ in range(2):
        plan = scheduler.schedule()
        assert plan is not None and plan.composition.num_common_pages == 0, "alone"
        scheduler.collect(device.run(plan))
    scheduler.add(request("b", [*STEM, 2, 3], 20))
    scheduler.add(request("c", STEM, 20))  # computes its last token, so its third page is its own
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.collect(device.run(plan))
    return plan


def test_who_filled_a_page_and_who_found_it() -> None:
    scheduler = make(budget=64)
    device = Device(scheduler, 2)
    device.rng.random = lambda: 1.0  # type: ignore[method-assign]  no request stops early
    plan = started(scheduler, device)
    assert plan.composition.request_ids == ("a", "b", "c") and plan.composition.num_common_pages == 2
    decodes = [scheduler.schedule() for _ in range(3)]
    compositions = {id(step.composition) for step in decodes if step is not None}
    assert len(compositions) == 1 and decodes[0] is not None
    assert decodes[0].composition.num_common_pages == 2, "kept with the composition"
    for step in decodes:
        assert step is not None
        scheduler.collect(device.run(step))
    assert scheduler.finish("c")
    plan_without = scheduler.schedule()
    assert plan_without is not None and plan_without.composition.num_common_pages == 3


def test_never_means_that_pages_are_not_counted() -> None:
    scheduler = make(budget=64)
    scheduler._pages._config = replace(scheduler.config, least_saved=None)
    device = Device(scheduler, 2)
    device._check_common = lambda _plan: None  # type: ignore[method-assign]
    assert started(scheduler, device).composition.num_common_pages == 0


def test_what_the_simulation_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Common pages, preemptions and drafts together; else what ``Device`` checks proves little."""
    seen: list[int] = []
    check = Device._check_common

    def count(self: Device, plan: StepPlan) -> None:
        check(self, plan)
        seen.append(plan.composition.num_common_pages)

    monkeypatch.setattr(Device, "_check_common", count)
    preempted = 0
    for seed in range(60):
        before = sum(map(bool, seen))
        stats = simulate(seed, 1 + seed % 3, [9, 14, 40][seed % 3], 7, True, [0, 3][seed % 2], seed % 4 == 1).stats
        preempted += stats.num_preemptions > 0 and sum(map(bool, seen)) > before
    assert sum(map(bool, seen)) > 100 and max(seen) > 1 and preempted > 5
