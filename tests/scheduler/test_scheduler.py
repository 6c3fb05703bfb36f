"""The scheduler against a device that is played by a few lines: exact lengths, a token a step, random ends."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.config import CacheConfig, SchedulerConfig
from slipstream.scheduler.scheduler import Scheduler
from slipstream.types import Request, RowStatus, SamplingParams, ScheduledRequest, StepPlan, StepResult

PARAMS = SamplingParams(temperature=0.0, seed=0)
STOP_ID = 1


def make(max_num_seqs: int = 4, budget: int = 16, chunk: int = 16, pages: int = 40, max_len: int = 64) -> Scheduler:
    config = SchedulerConfig(max_num_seqs, budget, chunk, max_len)
    return Scheduler(config, CacheConfig(page_size=4, num_pages=pages + 1))


def request(name: str, prompt_len: int, max_tokens: int = 8) -> Request:
    return Request(name, tuple([7] * prompt_len), PARAMS, (STOP_ID,), prompt_len + max_tokens)


@dataclass
class Row:
    computed: int = 0
    length: int = 0
    limit: int = 0
    status: RowStatus = RowStatus.INERT
    pages: dict[int, int] = field(default_factory=dict)


def owner(scheduled: ScheduledRequest) -> tuple[str, int]:
    return scheduled.request_id, scheduled.generation


class Device:
    """Rows as the device has them. Checks every plan against what it really holds."""

    def __init__(self, scheduler: Scheduler, seed: int) -> None:
        self.rows = [Row() for _ in range(scheduler._config.max_num_seqs)]
        self.scheduler = scheduler
        self.rng = random.Random(seed)
        # What each cache slot holds: (request, admission, position). A wrong owner is a wrong token on a real device.
        self.memory: dict[tuple[int, int], tuple[str, int, int]] = {}

    def run(self, plan: StepPlan) -> StepResult:
        config, page_size = self.scheduler._config, self.scheduler.pool.page_size
        for init in plan.row_inits:
            self.rows[init.row] = Row(0, len(init.token_ids), init.max_total_tokens, RowStatus.RUNNING)
        for diff in plan.page_diffs:
            self.rows[diff.row].pages.update(enumerate(diff.page_ids, diff.first_idx))
        assert 0 < plan.num_tokens <= config.max_num_batched_tokens
        assert len({r.row for r in plan.requests}) == len(plan.requests) <= config.max_num_seqs
        tokens, statuses = [], []
        for scheduled in plan.requests:
            row, new = self.rows[scheduled.row], []
            if row.status == RowStatus.RUNNING:
                # Law 2: the bound is never below the truth; without drafts it is exact while the row runs.
                assert scheduled.num_computed_bound == row.computed
                assert row.computed + scheduled.num_tokens <= row.length, "computes a token that does not exist"
                for position in range(row.computed + scheduled.num_tokens):
                    page_id = row.pages[position // page_size]
                    slot, content = (page_id, position % page_size), (*owner(scheduled), position)
                    assert page_id != 0, "the null page belongs to nobody"
                    if position >= row.computed:
                        self.memory[slot] = content
                    assert self.memory[slot] == content, "somebody else wrote here"
                row.computed += scheduled.num_tokens
                assert scheduled.samples == (row.computed == row.length)
                if row.computed == row.length:
                    new = [STOP_ID if self.rng.random() < 0.05 else 9]
                    row.length += 1
                    if new == [STOP_ID]:
                        row.status = RowStatus.STOPPED
                    elif row.length >= row.limit:
                        row.status = RowStatus.LENGTH
            tokens.append(new)
            statuses.append(row.status)
        return StepResult(plan, tokens, statuses)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    in_flight=st.sampled_from([1, 2, 4]),
    pages=st.sampled_from([9, 14, 40]),
    budget=st.sampled_from([4, 7, 64]),
)
def test_random_requests_all_finish_and_nothing_leaks(seed: int, in_flight: int, pages: int, budget: int) -> None:
    rng = random.Random(seed)
    scheduler = make(budget=budget, chunk=rng.choice([1, 5, 64]), pages=pages, max_len=36)
    device = Device(scheduler, seed)
    todo = [request(f"r{i}", rng.randint(1, 20), rng.randint(1, 16)) for i in range(rng.randint(1, 12))]
    flying: deque[StepResult] = deque()
    finished, aborted = {}, set()
    counts: dict[str, int] = {}
    idle = 0
    while todo or scheduler.has_requests or flying:
        while todo and rng.random() < 0.4:
            scheduler.add(todo.pop())
        if rng.random() < 0.03 and (alive := [r.request_id for r in _alive(scheduler)]):
            aborted.add(victim := rng.choice(alive))
            assert scheduler.finish(victim)
        while len(flying) < in_flight and (plan := scheduler.schedule()):
            flying.append(device.run(plan))
        idle = 0 if flying else idle + 1
        assert idle < 100, "nothing is scheduled although there is work"
        if flying:
            for update in scheduler.collect(flying.popleft()):
                assert update.request_id not in aborted and update.request_id not in finished
                counts[update.request_id] = counts.get(update.request_id, 0) + len(update.token_ids)
                if update.finish_reason:
                    finished[update.request_id] = update.finish_reason
    scheduler.check_idle()
    assert set(finished.values()) <= {"stop", "length"}


def _alive(scheduler: Scheduler) -> list[Request]:
    return [s.request for s in [*scheduler.waiting, *scheduler.running]]


def test_decodes_come_before_prompts_and_prompts_share_what_is_left() -> None:
    scheduler = make(budget=10, chunk=6)
    device = Device(scheduler, 0)
    scheduler.add(request("a", 3))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.collect(device.run(plan))
    scheduler.add(request("b", 20))
    scheduler.add(request("c", 20))
    plan = scheduler.schedule()
    assert plan is not None
    assert [(r.request_id, r.num_tokens) for r in plan.requests] == [("a", 1), ("b", 6), ("c", 3)]


def test_runs_ahead_only_as_far_as_the_length_limit() -> None:
    scheduler = make()
    scheduler.add(request("a", 3, max_tokens=2))
    plans = [scheduler.schedule() for _ in range(3)]
    assert [p is not None for p in plans] == [True, True, False]


def test_row_and_pages_of_an_aborted_request_wait_for_its_last_step() -> None:
    scheduler = make(max_num_seqs=1)
    device = Device(scheduler, 0)
    scheduler.add(request("a", 3))
    scheduler.add(request("b", 3))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None and second is not None
    scheduler.finish("a")
    assert scheduler.schedule() is None, "the row is still in flight"
    assert scheduler.collect(device.run(first)) == []
    assert scheduler.schedule() is None
    scheduler.collect(device.run(second))
    third = scheduler.schedule()
    assert third is not None and [r.request_id for r in third.requests] == ["b"]


def test_preemption_collects_first_and_takes_the_youngest() -> None:
    scheduler = make(pages=4, max_len=16)
    device = Device(scheduler, 99)
    scheduler.add(request("old", 6, 10))
    scheduler.add(request("young", 6, 10))
    flying = []
    for _ in range(4):
        plan = scheduler.schedule()
        if plan is None:
            break
        flying.append(device.run(plan))
    assert scheduler.stats.num_preemptions == 0, "not while a step in flight may still free pages"
    for result in flying:
        scheduler.collect(result)
    plan = scheduler.schedule()
    assert plan is not None and [r.request_id for r in plan.requests] == ["old"]
    assert scheduler.stats.num_preemptions == 1
    assert [s.request.request_id for s in scheduler.waiting] == ["young"]


def test_unknown_requests_cannot_be_finished() -> None:
    assert make().finish("nobody") is False


@pytest.mark.parametrize("when", ["waiting", "running"])
def test_finish_frees_at_once_what_no_step_holds(when: str) -> None:
    scheduler = make()
    device = Device(scheduler, 3)
    scheduler.add(request("a", 3))
    if when == "running":
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.collect(device.run(plan))
    assert scheduler.finish("a")
    assert not scheduler.has_requests
    scheduler.check_idle()
