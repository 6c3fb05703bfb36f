"""The scheduler against a device that is played by a few lines: exact lengths, a token a step, random ends."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.config import CacheConfig, SchedulerConfig
from slipstream.plan import RowStatus, ScheduledRequest, StepPlan, StepResult
from slipstream.request import Request
from slipstream.sampling_params import SamplingParams
from slipstream.scheduler.draft_length import FixedLength, Lengths
from slipstream.scheduler.pages import PagePool, page_hashes
from slipstream.scheduler.scheduler import Scheduler
from slipstream.speculative_config import Needs

PARAMS = SamplingParams(temperature=0.0, seed=0)
STOP_ID = 1


def make(
    max_num_seqs: int = 4,
    budget: int = 16,
    chunk: int = 16,
    pages: int = 40,
    max_len: int = 64,
    caching: bool = True,
    num_drafts: int = 0,
    own_keys: bool = False,
    exact_lengths: Literal["never", "prefill", "always"] = "never",
) -> Scheduler:
    config = SchedulerConfig(
        *(max_num_seqs, max(budget, max_num_seqs * (1 + num_drafts)), chunk, max_len),
        prefix_caching=caching,
        num_drafts=num_drafts,
        num_draft_slots=num_drafts if own_keys else 0,
        needs=Needs(own_keys=own_keys, catches_up=own_keys),
        exact_lengths=exact_lengths,
        least_saved=1,
    )
    return Scheduler(config, CacheConfig(page_size=4, num_pages=pages + 1))


def request(
    name: str, prompt: int | list[int], max_tokens: int = 8, priority: int = 0, max_k: int | None = None
) -> Request:
    tokens = prompt if isinstance(prompt, list) else [ord(name[0])] * prompt
    params = replace(PARAMS, max_k=max_k)
    return Request(name, tuple(tokens), params, (STOP_ID,), len(tokens) + max_tokens, priority=priority)


@dataclass
class Row:
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    limit: int = 0
    max_drafts: int = 0
    status: RowStatus = RowStatus.INERT
    pages: dict[int, int] = field(default_factory=dict)


class Device:
    """Rows as the device has them. Checks every plan against what it really holds."""

    def __init__(self, scheduler: Scheduler, seed: int) -> None:
        self.rows = [Row() for _ in range(scheduler.config.max_num_seqs)]
        self.scheduler = scheduler
        self.rng = random.Random(seed)
        # What each slot was computed from: the token there and all before it. Reading another is a wrong token.
        self.memory: dict[tuple[int, int], tuple[int, ...]] = {}

    def run(self, plan: StepPlan) -> StepResult:
        config = self.scheduler.config
        for init in plan.row_inits:
            limits = (init.request.max_total_tokens, init.request.num_drafts(config.num_drafts))
            self.rows[init.row] = Row(list(init.token_ids), init.num_computed, *limits, RowStatus.RUNNING)
        for diff in plan.page_diffs:
            # Beyond the length limit there may be another row's part of the table.
            needed = self.scheduler.pool.pages_for(self.rows[diff.row].limit)
            assert diff.first_idx + len(diff.page_ids) <= needed, "more pages than the request can fill"
            self.rows[diff.row].pages.update(enumerate(diff.page_ids, diff.first_idx))
        assert 0 < plan.num_tokens <= config.max_num_batched_tokens
        assert len({r.row for r in plan.requests}) == len(plan.requests) <= config.max_num_seqs
        # The rows' tokens are staged at once, and the staging buffers have room for so many.
        assert sum(len(init.token_ids) for init in plan.row_inits) <= config.max_staged_tokens
        self._check_common(plan)
        tokens, statuses = [], []
        for scheduled in plan.requests:
            row = self.rows[scheduled.row]
            tokens.append(self._advance(row, scheduled) if row.status == RowStatus.RUNNING else [])
            statuses.append(row.status)
        none = [0] * len(tokens)
        return StepResult(plan, tokens, statuses, none, [max(0, len(new) - 1) for new in tokens], none)

    def _check_common(self, plan: StepPlan) -> None:
        """As many leading pages as all have, filled, and every query token after them."""
        rows = [self.rows[row] for row in plan.composition.rows]
        longest = min(len(row.pages) for row in rows) if len(rows) > 1 else 0
        shared = (i for i in range(longest) if len({row.pages[i] for row in rows}) > 1)
        num_common = plan.composition.num_common_pages
        assert num_common == next(shared, longest)
        assert all(row.computed >= num_common * self.scheduler.pool.page_size for row in rows)

    def _advance(self, row: Row, scheduled: ScheduledRequest) -> list[int]:
        page_size = self.scheduler.pool.page_size
        config = self.scheduler.config
        # Law 2: the bound is never below the truth; without drafts it is exact while the row runs.
        assert scheduled.num_computed_bound >= row.computed
        assert scheduled.num_computed_bound == row.computed or config.num_drafts
        end = row.computed + scheduled.num_tokens - scheduled.num_drafts
        assert end <= len(row.tokens), "computes a token that does not exist"
        for position in range(end):
            page_id = row.pages[position // page_size]
            slot, content = (page_id, position % page_size), tuple(row.tokens[: position + 1])
            assert page_id != 0, "the null page belongs to no request"
            if position >= row.computed:
                self.memory[slot] = content
            assert self.memory[slot] == content, "another request wrote here"
        row.computed = end
        assert scheduled.samples == (row.computed == len(row.tokens))
        if row.computed < len(row.tokens):
            return []
        return self._draw(row, scheduled, end)

    def _draw(self, row: Row, scheduled: ScheduledRequest, end: int) -> list[int]:
        """One token, and before it as many drafts as chance accepts of those that chance made."""
        config, page_size = self.scheduler.config, self.scheduler.pool.page_size
        room = min(scheduled.num_drafts, row.max_drafts, row.limit - len(row.tokens) - 1)
        num_drafts = self.rng.randint(0, max(0, room))
        for position in range(end, end + num_drafts):  # drafts leave their keys, accepted or not
            self.memory[(row.pages[position // page_size], position % page_size)] = ()
        new: list[int] = []
        for _ in range(self.rng.randint(0, num_drafts) + 1):
            new.append(STOP_ID if self.rng.random() < 0.05 else self.rng.choice([8, 9]))
            row.tokens.append(new[-1])
            if len(row.tokens) >= row.limit:
                row.status = RowStatus.LENGTH
            if new[-1] == STOP_ID:
                row.status = RowStatus.STOPPED
                break
        for position in range(end, len(row.tokens) - 1):
            slot = (row.pages[position // page_size], position % page_size)
            self.memory[slot] = tuple(row.tokens[: position + 1])
        row.computed = len(row.tokens) - 1
        if row.max_drafts and row.status == RowStatus.RUNNING:
            # The drafter's own keys reach as far as its drafts could be of use.
            for position in range(min(len(row.tokens) + config.num_draft_slots - 1, row.limit - 2)):
                assert row.pages[position // page_size], "no page for the drafter's keys"
        return new


def random_prompt(rng: random.Random) -> list[int]:
    """Prompts that begin alike more often than not."""
    stem = [rng.choice([3, 4])] * rng.choice([0, 4, 7, 8, 12])
    return (stem + [rng.choice([5, 6]) for _ in range(rng.randint(1, 8))])[:20]


def simulate(
    seed: int, in_flight: int, pages: int, budget: int, caching: bool, num_drafts: int = 0, own_keys: bool = False
) -> Scheduler:
    """Random arrivals, aborts and priorities; the integrity of pages is checked after every event."""
    rng = random.Random(seed)
    scheduler = make(
        budget=budget,
        chunk=rng.choice([1, 5, 64]),
        pages=pages,
        max_len=36,
        caching=caching,
        num_drafts=num_drafts,
        own_keys=own_keys,
    )
    device = Device(scheduler, seed)
    limits = [None, None, 0, 1, 2] if num_drafts else [None]
    todo = [
        request(f"r{i}", random_prompt(rng), rng.randint(1, 16), rng.choice([0, 0, 0, 1, -1]), rng.choice(limits))
        for i in range(rng.randint(1, 14))
    ]
    requested = {r.request_id: r for r in todo}
    flying: deque[StepResult] = deque()
    finished, aborted = {}, set()
    counts = dict.fromkeys(requested, 0)
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
                counts[update.request_id] += len(update.token_ids)
                if update.finish_reason:
                    finished[update.request_id] = update.finish_reason
            if num_drafts and not flying:
                # Law 3: with nothing in flight the mirror is the truth again.
                for state in scheduler.running:
                    assert state.num_computed == device.rows[state.row].computed
                    assert state.token_ids == device.rows[state.row].tokens
        scheduler.pool.check([s.page_ids for s in [*scheduler.running, *scheduler._leaving]])
    scheduler.check_idle()
    assert set(finished) | aborted == set(requested)
    if not aborted:  # each request counts once, however often it moved in
        assert scheduler.stats.num_prompt_tokens == sum(len(r.prompt_token_ids) for r in requested.values())
    for request_id, reason in finished.items():
        limit = requested[request_id].max_total_tokens - len(requested[request_id].prompt_token_ids)
        assert counts[request_id] == limit if reason == "length" else counts[request_id] <= limit
    return scheduler


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    in_flight=st.sampled_from([1, 2, 4]),
    pages=st.sampled_from([9, 14, 40]),
    budget=st.sampled_from([4, 7, 64]),
    caching=st.sampled_from([True, True, False]),
    num_drafts=st.sampled_from([0, 1, 3, 5]),
    own_keys=st.booleans(),
)
def test_random_requests_all_finish_and_nothing_leaks(
    seed: int, in_flight: int, pages: int, budget: int, caching: bool, num_drafts: int, own_keys: bool
) -> None:
    simulate(seed, in_flight, pages, budget, caching, num_drafts, own_keys and num_drafts > 0)


def test_the_simulation_reaches_what_it_is_for() -> None:
    """Over a few hundred seeds there are hits, preemptions and both together; else the test above proves little."""
    stats = [simulate(seed, 1 + seed % 3, [9, 14, 40][seed % 3], 7, True).stats for seed in range(300)]
    assert sum(s.num_cached_tokens > 0 for s in stats) > 100
    assert sum(s.num_preemptions > 0 for s in stats) > 50


@pytest.mark.slow
def test_ten_thousand_sequences() -> None:
    for seed in range(10_000):
        num_drafts = [0, 1, 3, 5][seed // 4 % 4]
        own_keys = num_drafts > 0 and seed // 16 % 2 == 0
        sizes = ([9, 11, 14, 40][seed % 4], [4, 7, 64][seed % 3])
        simulate(seed, 1 + seed % 4, *sizes, seed % 5 > 0, num_drafts, own_keys)


def _alive(scheduler: Scheduler) -> list[Request]:
    return [s.request for s in [*scheduler.waiting, *scheduler.running]]


def test_decodes_come_before_prompts_and_prompts_share_what_is_left() -> None:
    scheduler = make(budget=10, chunk=6)
    device = Device(scheduler, 1)
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
    assert not scheduler.collect(device.run(first))
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
    assert make().finish("unknown") is False


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


def run_to_end(scheduler: Scheduler, device: Device) -> list[str]:
    """Runs one step at a time; returns request ids in the order in which they finish."""
    finished = []
    while (plan := scheduler.schedule()) is not None:
        for update in scheduler.collect(device.run(plan)):
            if update.finish_reason:
                finished.append(update.request_id)
    return finished


def test_a_prompt_seen_before_is_not_computed_again() -> None:
    scheduler = make(pages=40)
    device = Device(scheduler, 7)
    prompt = list(range(10, 21))  # two full pages of four and three more tokens
    scheduler.add(request("first", prompt))
    run_to_end(scheduler, device)
    scheduler.add(request("second", [*prompt[:10], 99]))
    plan = scheduler.schedule()
    assert plan is not None and (plan.row_inits[0].num_computed, plan.requests[0].num_tokens) == (8, 3)
    # A prompt that is cached whole still computes its last token: the next one has to be sampled.
    scheduler.add(request("third", prompt[:8]))
    plan = scheduler.schedule()
    assert plan is not None
    assert [(i.num_computed) for i in plan.row_inits] == [4]
    assert scheduler.stats.num_cached_tokens == 12


def test_only_collected_pages_are_shared() -> None:
    scheduler = make()
    scheduler.add(request("a", [5] * 12))
    assert scheduler.schedule() is not None  # in flight, not collected
    scheduler.add(request("b", [5] * 12))
    plan = scheduler.schedule()
    assert plan is not None and plan.row_inits[0].num_computed == 0


def test_the_least_recently_used_page_is_forgotten_first() -> None:
    pool = PagePool(5, 4)
    old, new = pool.take(2), pool.take(2)
    for page_id, name in zip(old + new, (b"a", b"b", b"c", b"d"), strict=True):
        pool.remember(page_id, name)
    pool.give_back(old)
    pool.give_back(new)
    pool.take(1)
    assert pool.find([b"a", b"b"]) == old[:1], "the end of the older request goes first"
    assert pool.find([b"c", b"d"]) == new
    pool.take(1)
    assert pool.find([b"a"]) == []


def test_hashes_depend_on_everything_before() -> None:
    one, two = list(page_hashes([1, 2, 3, 4, 5], 2)), list(page_hashes([9, 2, 3, 4], 2))
    assert len(one) == 2 and one[1] != two[1]
    assert one == [*page_hashes([1, 2], 2), *page_hashes([3, 4], 2, one[0])]


def test_priority_goes_first_and_takes_the_place_of_a_lower_one() -> None:
    scheduler = make(max_num_seqs=1)
    device = Device(scheduler, 5)
    for name, priority in (("low", 5), ("mid", 3), ("high", -1)):
        scheduler.add(request(name, 4, 3, priority))
    plan = scheduler.schedule()
    assert plan is not None and plan.requests[0].request_id == "high"
    scheduler.collect(device.run(plan))
    scheduler.add(request("urgent", 4, 3, -2))
    assert run_to_end(scheduler, device) == ["urgent", "high", "mid", "low"]
    assert scheduler.stats.num_preemptions == 1


def test_under_pressure_the_oldest_always_moves() -> None:
    """Fairness: requests finish in the order they came when all are alike and pages are scarce."""
    scheduler = make(pages=9, max_len=36)
    device = Device(scheduler, 0)
    device.rng.random = lambda: 1.0  # type: ignore[method-assign]  no request stops early
    for i in range(6):
        scheduler.add(request(f"{chr(97 + i)}", 12, 16))
    assert run_to_end(scheduler, device) == ["a", "b", "c", "d", "e", "f"]
    assert scheduler.stats.num_preemptions > 0


def test_steps_that_want_true_lengths_are_launched_alone() -> None:
    """With prompts alone that is so for prompts; decodes run ahead of each other."""
    scheduler = make(exact_lengths="prefill")
    device = Device(scheduler, 2)
    scheduler.add(request("a", 4))
    first = scheduler.schedule()
    assert first is not None and first.composition.lengths_are_exact
    second = scheduler.schedule()
    assert second is not None and not second.composition.lengths_are_exact, "a decode"
    scheduler.add(request("b", 4))
    assert scheduler.schedule() is None and scheduler.stats.num_drains == 1
    scheduler.collect(device.run(first))
    assert scheduler.schedule() is None
    scheduler.collect(device.run(second))
    third = scheduler.schedule()
    assert third is not None and third.composition.lengths_are_exact and third.composition.num_reqs == 2


def test_always_means_one_step_at_a_time() -> None:
    scheduler = make(exact_lengths="always")
    device = Device(scheduler, 2)
    scheduler.add(request("a", 4))
    for _ in range(4):
        plan = scheduler.schedule()
        assert plan is not None and plan.composition.lengths_are_exact
        assert scheduler.schedule() is None
        scheduler.collect(device.run(plan))
    assert scheduler.stats.num_drains == 4


class SetLength(FixedLength):
    """Whatever a test asks for."""

    def __init__(self, check: int, make: int) -> None:
        self._lengths = Lengths(check, make)

    def set(self, check: int, make: int) -> None:
        self._lengths = Lengths(check, make)


def test_steps_verify_what_was_proposed_and_propose_what_is_requested() -> None:
    """A drafter with its own keys processes every prompt, even if no drafts are requested."""
    config = SchedulerConfig(
        4, 32, 16, 64, num_drafts=5, num_draft_slots=5, needs=Needs(own_keys=True, catches_up=True)
    )
    length = SetLength(5, 0)
    scheduler = Scheduler(config, CacheConfig(page_size=4, num_pages=60), length)
    scheduler.add(request("a", 4, 40))

    def next_step() -> tuple[int, int]:
        plan = scheduler.schedule()
        assert plan is not None
        return plan.composition.num_drafts[0], plan.composition.num_next_drafts

    assert next_step() == (0, 1), "a prompt"
    assert next_step() == (1, 0), "what the prompt's step has made is checked"
    length.set(5, 3)
    assert next_step() == (0, 3), "nothing was made for it to check"
    length.set(2, 2)
    assert next_step() == (2, 2), "fewer at once"
    assert next_step() == (2, 2)
    length.set(5, 5)
    assert [next_step(), next_step()] == [(2, 5), (5, 5)], "more take a step"


@pytest.mark.parametrize(
    ("own_keys", "follows", "asked", "proposed"),
    [
        (True, False, 0, 3),  # it must be shown the prompt
        (True, True, 0, 0),  # it is shown it anyhow
        (False, False, 0, 0),
        (True, True, 5, 3),
        (False, False, 1, 3),
    ],
)
def test_behind_a_step_with_prompts_as_many_are_made_as_there_is_a_graph_for(
    own_keys: bool, follows: bool, asked: int, proposed: int
) -> None:
    config = SchedulerConfig(
        *(4, 32, 16, 64),
        num_drafts=5,
        num_draft_slots=5,
        needs=Needs(own_keys=own_keys, catches_up=own_keys, follows=follows),
        drafts_beside_prompts=3,
    )
    scheduler = Scheduler(config, CacheConfig(page_size=4, num_pages=60), SetLength(5, asked))
    scheduler.add(request("a", 4, 40))
    steps = []
    for step in range(4):
        if step == 2:
            scheduler.add(request("b", 4, 40))
        plan = scheduler.schedule()
        assert plan is not None
        steps.append((plan.composition.num_drafts[0], plan.composition.num_next_drafts))
    # A prompt; a decode; a decode beside a prompt; two decodes. Drafts beyond those requested are verified as well.
    assert steps == [(0, proposed), (proposed, asked), (asked, proposed), (proposed, asked)]


def test_the_end_of_the_last_request_does_not_look_at_every_page() -> None:
    """On a GPU with much memory that takes longer than many steps; what is lost shows in the counts too."""
    scheduler = make(pages=100_000)
    scheduler.pool.check = lambda held: pytest.fail("looked at each page")  # type: ignore[method-assign]
    scheduler.check_idle()
    scheduler.pool.take(1)
    with pytest.raises(RuntimeError, match="leak: 1 pages"):
        scheduler.check_idle()
