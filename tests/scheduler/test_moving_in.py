"""Which requests get a row in a step, and what they take with it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slipstream.config import CacheConfig, SchedulerConfig
from slipstream.scheduler.scheduler import Scheduler
from tests.scheduler.test_scheduler import Device, make, request


@pytest.mark.parametrize("had_run", [False, True], ids=["new", "preempted"])
def test_requests_move_in_as_far_as_their_tokens_can_be_staged(had_run: bool) -> None:
    """Small chunks leave the step room for many long prompts, and all of a prompt is staged when it moves in."""
    scheduler = make(max_num_seqs=8, budget=64, chunk=4, pages=200, max_len=64)
    device = Device(scheduler, 1)
    for name in "abcde":
        scheduler.add(request(name, 25))
    if had_run:
        while scheduler.waiting:
            plan = scheduler.schedule()
            assert plan is not None
            scheduler.collect(device.run(plan))
        for state in [*scheduler.running]:
            scheduler._preempt(state)
    moved_in = []
    for _ in range(3):
        plan = scheduler.schedule()
        assert plan is not None
        moved_in.append([init.request.request_id for init in plan.row_inits])
        scheduler.collect(device.run(plan))
    assert moved_in == [["a", "b"], ["c", "d"], ["e"]]


def unending(scheduler: Scheduler) -> Device:
    """No request of it stops before its length limit."""
    device = Device(scheduler, 0)
    device.rng.random = lambda: 1.0  # type: ignore[method-assign]
    return device


def test_prompts_beside_decodes_are_held_to_a_share_of_the_step() -> None:
    """Users read the decodes, which a step with a long prompt would delay. A prompt alone has the whole budget."""
    config = SchedulerConfig(4, 64, 64, 64, mixed_prefill_tokens=6)
    scheduler = Scheduler(config, CacheConfig(page_size=4, num_pages=100))
    device = unending(scheduler)
    sizes = []
    for step in range(4):
        if step < 2:
            scheduler.add(request("ab"[step], 20, 16))
        plan = scheduler.schedule()
        assert plan is not None
        sizes.append({r.request_id: r.num_tokens for r in plan.requests})
        scheduler.collect(device.run(plan))
    assert sizes == [{"a": 20}, {"a": 1, "b": 6}, {"a": 1, "b": 6}, {"a": 1, "b": 6}]


def test_a_request_that_moves_in_again_is_counted_once() -> None:
    """And what it had found in the prefix cache is what it found at first, though its own pages are there later."""
    scheduler = make()
    device = unending(scheduler)
    scheduler.add(request("a", 13, 20))
    updates = []
    for step in range(4):
        if step == 2:
            scheduler._preempt(scheduler.running[0])
        plan = scheduler.schedule()
        assert plan is not None
        updates += scheduler.collect(device.run(plan))
    assert plan is not None and plan.num_computed_bounds[0] > 12
    stats = scheduler.stats
    assert (stats.num_preemptions, stats.num_prompt_tokens, stats.num_cached_tokens) == (1, 13, 0)
    assert {update.num_cached_tokens for update in updates} == {0}


def test_a_request_that_wants_no_drafts_has_no_room_for_them() -> None:
    """Alone, its steps have no draft slots and propose nothing."""
    scheduler = make(num_drafts=5)
    device = unending(scheduler)
    scheduler.add(request("a", 4, max_k=0))
    for num_tokens in (4, 1, 1):
        plan = scheduler.schedule()
        assert plan is not None
        composition = plan.composition
        assert (plan.num_tokens, composition.num_drafts, composition.num_next_drafts) == (num_tokens, (0,), 0)
        scheduler.collect(device.run(plan))


def test_prompts_whose_positions_are_all_scored_take_nothing_from_the_cache() -> None:
    scheduler = make()
    device = unending(scheduler)
    computed = []
    for name, num_scored in (("first", None), ("scored", 2), ("third", None)):
        asked = request(name, [7] * 9, max_tokens=1)
        scheduler.add(replace(asked, params=replace(asked.params, prompt_logprobs=num_scored)))
        plan = scheduler.schedule()
        assert plan is not None
        computed.append(plan.num_tokens)
        scheduler.collect(device.run(plan))
    assert computed == [9, 9, 1]


def test_compositions_that_may_come_again_are_kept_in_a_bounded_number() -> None:
    """One object for each kind of step, by which recorded steps are found; of a long run's kinds only the latest."""
    scheduler = make(max_num_seqs=1, caching=False)
    device = unending(scheduler)
    for i in range(40):
        scheduler.add(request(f"r{i}", 1 + i % 16, max_tokens=3))
        compositions = []
        while scheduler.has_requests:
            plan = scheduler.schedule()
            assert plan is not None
            compositions.append(plan.composition)
            scheduler.collect(device.run(plan))
        assert compositions[1] is compositions[2], "decodes of one request"
        assert len(scheduler._recent) <= 8
