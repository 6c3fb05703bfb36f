"""Steps whose logits were no numbers: what they have left in the cache is of use to no request."""

from __future__ import annotations

import pytest

from slipstream.plan import RowStatus, ScheduledRequest
from slipstream.scheduler.scheduler import Scheduler
from tests.scheduler.test_scheduler import Device, Row, make, request, run_to_end

PROMPT = list(range(10, 23))  # three full pages of four tokens, and one token more


class FailingDevice(Device):
    """Requests whose names begin with "bad" fail when they are to draw a token, and leave no usable keys."""

    def _advance(self, row: Row, scheduled: ScheduledRequest) -> list[int]:
        first = row.computed
        if not (scheduled.request_id.startswith("bad") and scheduled.samples):
            return super()._advance(row, scheduled)
        page_size = self.scheduler.pool.page_size
        for position in range(first, first + scheduled.num_tokens):
            self.memory[row.pages[position // page_size], position % page_size] = ()
        row.computed, row.status = first + scheduled.num_tokens, RowStatus.ERROR
        return []


def add(scheduler: Scheduler, name: str, prompt: list[int]) -> None:
    scheduler.add(request(name, prompt))


@pytest.mark.parametrize("neighbour", [False, True], ids=["alone", "beside another"])
def test_pages_of_a_step_that_failed_are_not_found_again(neighbour: bool) -> None:
    scheduler = make()
    device = FailingDevice(scheduler, 0)
    if neighbour:
        add(scheduler, "good", [5, 6, 7])
    add(scheduler, "bad", PROMPT)
    plan = scheduler.schedule()
    assert plan is not None
    (update,) = [u for u in scheduler.collect(device.run(plan)) if u.request_id == "bad"]
    assert update.finish_reason == "error"
    add(scheduler, "again", PROMPT)
    plan = scheduler.schedule()
    assert plan is not None and [init.num_computed for init in plan.row_inits] == [0]
    scheduler.collect(device.run(plan))
    run_to_end(scheduler, device)
    scheduler.check_idle()


def test_pages_from_before_a_failure_are_found_again() -> None:
    """They were there when the request came: the failed step has only read them."""
    scheduler = make()
    device = FailingDevice(scheduler, 0)
    add(scheduler, "first", PROMPT[:9])
    run_to_end(scheduler, device)
    add(scheduler, "bad", PROMPT)
    run_to_end(scheduler, device)
    add(scheduler, "again", PROMPT)
    plan = scheduler.schedule()
    assert plan is not None and plan.row_inits[0].num_computed == 8
    scheduler.collect(device.run(plan))
    run_to_end(scheduler, device)
    scheduler.check_idle()
