"""A scheduler that repeats steps decides as one that never does: the same plans, the same updates, to the last page."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.config import CacheConfig, SchedulerConfig
from slipstream.output import TokenUpdates
from slipstream.plan import Composition, RowStatus, StepPlan, StepResult
from slipstream.scheduler.draft_length import DraftLength, FixedLength, Lengths
from slipstream.scheduler.request_state import RequestState
from slipstream.scheduler.scheduler import Scheduler
from tests.scheduler.test_scheduler import Device, make, request


class Undecided(Scheduler):
    """Begins at the beginning, step after step and request after request."""

    def schedule(self) -> StepPlan | None:
        return self._decide()

    def collect(self, result: StepResult) -> TokenUpdates:
        self._collector.take_all = self._collector.take_each  # type: ignore[method-assign]
        return super().collect(result)


class Counting(Scheduler):
    num_decided = 0

    def _decide(self) -> StepPlan | None:
        self.num_decided += 1
        return super()._decide()


class Varying(FixedLength):
    """Another number to check every few steps; as many are made as there may be, or none where none are checked."""

    def __init__(self, num_drafts: int, seed: int) -> None:
        super().__init__(num_drafts)
        self._most, self._rng, self._left = num_drafts, random.Random(seed), 6

    def launched(self, composition: Composition) -> None:
        self._left -= 1
        if not self._left:
            self._left = self._rng.randint(1, 12)
            check = self._rng.randint(0, self._most)
            self._lengths = Lengths(check, self._most if check else self._rng.choice([0, self._most]))


def pair(lengths: Callable[[], DraftLength | None], **sizes: int | bool) -> tuple[Counting, Undecided]:
    like = make(**sizes)  # type: ignore[arg-type]
    return Counting(like.config, like._cache, lengths()), Undecided(like.config, like._cache, lengths())


def assert_same_plan(one: StepPlan | None, other: StepPlan | None) -> None:
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert one.step_id == other.step_id and one.num_tokens == other.num_tokens
        assert one.requests == other.requests
        assert one.composition == other.composition
        assert one.row_inits == other.row_inits
        assert one.page_diffs == other.page_diffs


def assert_same_state(one: Scheduler, other: Scheduler) -> None:
    for kind in ("waiting", "running", "_leaving"):
        pairs = zip(getattr(one, kind), getattr(other, kind), strict=True)
        for a, b in pairs:
            for name in RequestState.__dataclass_fields__:
                assert getattr(a, name) == getattr(b, name), (kind, a.request.request_id, name)
    assert one.pool._free == other.pool._free and one.pool._unheld == other.pool._unheld
    assert one.stats == other.stats


def drive(
    seed: int,
    in_flight: int,
    pages: int,
    caching: bool,
    num_drafts: int,
    own_keys: bool,
    busy: float,
    varies: bool = False,
) -> float:
    """Both through the same events; gives the share of steps that were repeated."""
    rng = random.Random(seed)
    sizes = {"budget": rng.choice([7, 64]), "chunk": rng.choice([1, 5, 64]), "pages": pages, "max_len": 120}
    lengths = partial(Varying, num_drafts, seed) if varies else lambda: None
    steady, undecided = pair(lengths, **sizes, caching=caching, num_drafts=num_drafts, own_keys=own_keys)
    device = Device(steady, seed)
    # Fewer stop tokens than usual, for batches that last.
    chance = device.rng.random
    device.rng.random = lambda: chance() ** 0.2  # type: ignore[method-assign]
    limits = [None, None, 0, 1] if num_drafts else [None]
    todo = []
    for i in range(rng.randint(1, 10)):
        prompt = [rng.choice([3, 4])] * rng.choice([0, 4, 8]) + [rng.choice([5, 6]) for _ in range(rng.randint(1, 8))]
        max_tokens, priority = rng.randint(1, 100), rng.choice([0, 0, 0, 1, -1])
        todo.append(request(f"r{i}", prompt, max_tokens, priority, rng.choice(limits)))
    flying: deque[StepResult] = deque()
    num_steps = 0
    while todo or steady.has_requests or flying:
        while todo and (rng.random() < busy or not steady.has_requests):
            new = todo.pop()
            steady.add(new)
            undecided.add(new)
        alive = [s.request.request_id for s in [*steady.waiting, *steady.running]]
        if alive and rng.random() < busy / 8:
            victim = rng.choice(alive)
            assert steady.finish(victim) and undecided.finish(victim)
        while len(flying) < in_flight:
            plan = steady.schedule()
            assert_same_plan(plan, undecided.schedule())
            if plan is None:
                break
            num_steps += 1
            flying.append(device.run(plan))
        if flying:
            result = flying.popleft()
            if rng.random() < 0.01:
                i = rng.randrange(len(result.statuses))
                device.rows[result.plan.composition.rows[i]].status = result.statuses[i] = RowStatus.ERROR
            assert list(steady.collect(result)) == list(undecided.collect(result))
        assert_same_state(steady, undecided)
    steady.check_idle()
    undecided.check_idle()
    return 1 - min(1.0, steady.num_decided / max(1, num_steps))


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    in_flight=st.sampled_from([1, 2, 4]),
    pages=st.sampled_from([30, 45, 200]),
    caching=st.booleans(),
    num_drafts=st.sampled_from([0, 0, 1, 3]),
    own_keys=st.booleans(),
    busy=st.sampled_from([0.02, 0.1, 0.4]),
    varies=st.booleans(),
)
def test_repeating_decides_nothing_else(
    seed: int, in_flight: int, pages: int, caching: bool, num_drafts: int, own_keys: bool, busy: float, varies: bool
) -> None:
    drive(seed, in_flight, pages, caching, num_drafts, own_keys and num_drafts > 0, busy, varies)


def test_most_steps_are_repeated_where_little_happens() -> None:
    for num_drafts, varies, least in ((0, False, 0.4), (3, False, 0.4), (3, True, 0.5)):
        shares = [drive(seed, 2, 200, True, num_drafts, False, 0.02, varies) for seed in range(40)]
        assert sum(shares) / len(shares) > least, "else the test above proves little"


def test_a_composition_that_stays_is_one_object() -> None:
    """What the runner has derived from it can be kept, page borders or not."""
    config = SchedulerConfig(4, 64, 64, 64)
    scheduler = Scheduler(config, CacheConfig(page_size=4, num_pages=200))
    device = Device(scheduler, 0)
    device.rng.random = lambda: 1.0  # type: ignore[method-assign]  no request stops early
    for name in "abc":
        scheduler.add(request(name, 5, 40))
    compositions = []
    for _ in range(30):
        plan = scheduler.schedule()
        assert plan is not None
        compositions.append(plan.composition)
        scheduler.collect(device.run(plan))
    assert len({id(composition) for composition in compositions[1:]}) == 1
    assert scheduler.finish("b")
    plan = scheduler.schedule()
    assert plan is not None and plan.composition.request_ids == ("a", "c")
