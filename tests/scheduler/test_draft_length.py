"""The draft length that adapts, against costs and acceptances that are known."""

from __future__ import annotations

import random

import numpy as np
import pytest

from slipstream.plan import Composition
from slipstream.scheduler.draft_length import AdaptiveLength, Lengths
from slipstream.scheduler.step_costs import StepCosts

CHOICES = (0, 1, 2, 3, 5, 7)
HIGH = (0.730, 0.521, 0.355, 0.245, 0.170, 0.118, 0.082)
LOW = (0.3, 0.08, 0.02, 0.0, 0.0, 0.0, 0.0)
ZERO = (0.0,) * 7


class Engine:
    """Steps of a batch with a few in flight, drafts accepted at given rates, costs of which time is the sum."""

    def __init__(
        self, num_reqs: int, cost: dict[int, float], seed: int = 0, in_flight: int = 2, knows_acceptance: bool = True
    ) -> None:
        self.costs = StepCosts(in_graphs=True)
        for k, seconds in cost.items():
            self.costs.record(num_reqs, k, seconds)
        self.policy = AdaptiveLength(CHOICES, 3, num_reqs, self.costs, knows_acceptance)
        self.num_prompts = 0  # beside the decodes, in every step
        self._cost, self._n, self._random, self._depth = cost, num_reqs, random.Random(seed), in_flight
        for row in range(num_reqs):
            self.policy.move_in(row)
        self._flying: list[tuple[Composition, list[int], list[int]]] = []
        self._made = 0
        self._known: dict[tuple[int, int, int], Composition] = {}
        self.seconds, self.tokens = 0.0, 0
        self.trace: list[int] = []  # drafts that were made
        self.checked: list[int] = []

    def step(self, rates: tuple[float, ...]) -> None:
        check, make = self.policy.next_lengths()
        check = min(check, self._made)
        n = self._n
        # Steps that are alike share a composition, as the scheduler's do. Prompts are chunks that draw nothing.
        p, m = self.num_prompts, n + self.num_prompts
        composition = self._known.setdefault(
            (check, make, p),
            Composition(
                *(tuple(map(str, range(m))), (1,) * m, tuple(range(m)), (1 + check,) * n + (9,) * p),
                *((True,) * n + (False,) * p, (check,) * n + (0,) * p, n * (1 + check) + 9 * p, make),
            ),
        )
        draws = [self._random.random() for _ in range(n)] + [1.0] * p
        accepted = [sum(draw < rate for rate in rates[:check]) for draw in draws]
        # The device says whether an unverified draft would have been accepted.
        would_accept = [int(draw < rates[0] and self._made > 0 and check == 0) for draw in draws]
        # What a step costs is half what it checks and half what it makes.
        self.seconds += (self._cost[check] + self._cost[make]) / 2
        self.tokens += n + sum(accepted)
        self._made = make
        self.trace.append(make)
        self.checked.append(check)
        self.policy.launched(composition)
        self.policy.update()  # while it waits for an older one
        self._flying.append((composition, accepted, would_accept))
        if len(self._flying) >= self._depth:
            self.policy.collected(*self._flying.pop(0))

    def run(self, rates: tuple[float, ...], count: int) -> float:
        """Tokens a second of these steps."""
        seconds, tokens = self.seconds, self.tokens
        for _ in range(count):
            self.step(rates)
        return (self.tokens - tokens) / (self.seconds - seconds)


def dear(each: float) -> dict[int, float]:
    return {k: 1.0 + each * k for k in CHOICES}


def best_rate(rates: tuple[float, ...], cost: dict[int, float], num_reqs: int) -> float:
    return max(num_reqs * (1 + sum(rates[:k])) / seconds for k, seconds in cost.items())


@pytest.mark.parametrize("rates", [HIGH, LOW, ZERO], ids=["high", "low", "zero"])
@pytest.mark.parametrize("each", [0.03, 0.08, 0.25, 0.5])
@pytest.mark.parametrize("num_reqs", [1, 8, 64])
def test_it_is_near_the_best_and_never_much_slower_than_no_drafts(
    rates: tuple[float, ...], each: float, num_reqs: int
) -> None:
    cost = dear(each)
    engine = Engine(num_reqs, cost)
    engine.run(rates, 100)
    found = engine.run(rates, 2000)
    assert found > 0.98 * num_reqs / cost[0]
    assert found > 0.94 * best_rate(rates, cost, num_reqs)


@pytest.mark.parametrize("num_reqs", [1, 8, 64])
@pytest.mark.parametrize("each", [0.05, 0.2])
def test_a_change_is_followed_within_fifty_steps(each: float, num_reqs: int) -> None:
    cost = dear(each)
    late = 0
    for seed in range(40):
        engine = Engine(num_reqs, cost, seed)
        engine.run(ZERO, 150)
        engine.run(HIGH, 50)
        after = engine.run(HIGH, 150)
        late += after < 0.9 * best_rate(HIGH, cost, num_reqs)
        engine.run(ZERO, 50)
        assert engine.run(ZERO, 150) > 0.98 * num_reqs / cost[0]
    assert late <= (4 if num_reqs == 1 else 0)  # one request alone is a matter of luck


def test_it_comes_back_however_long_nothing_was_right() -> None:
    engine = Engine(4, dear(0.05))
    engine.run(ZERO, 5000)
    assert engine.policy.length == 0
    engine.run(HIGH, 60)
    assert engine.policy.length > 0


def test_while_nothing_is_drafted_a_trial_proposes_a_draft_that_is_not_verified() -> None:
    engine = Engine(2, dear(0.05))
    engine.run(ZERO, 200)
    trace = engine.trace[-128:]
    assert 2 <= sum(trace) <= 8, "one draft every 16 steps"
    assert all(made in (0, 1) for made in trace)
    engine.checked.clear()
    engine.run(ZERO, 200)
    assert sum(engine.trace[-200:]) > 0 and not any(engine.checked)


def test_who_has_begun_with_drafts_soon_tries_more() -> None:
    """Trials are rare where drafts are dear; but of what lies beyond the first nothing is known that is not old."""
    engine = Engine(8, dear(0.6))
    engine.run(ZERO, 400)
    assert engine.policy.length == 0 and engine.policy.interval > 20
    engine.trace.clear()
    engine.run((0.95, *ZERO[1:]), 120)
    begin = next(i for i, made in enumerate(engine.trace) if engine.trace[i : i + 4] == [1] * 4)
    assert next(i for i, made in enumerate(engine.trace[begin:]) if made > 1) <= 20


def test_where_that_says_too_little_it_is_checked() -> None:
    engine = Engine(2, dear(0.05), knows_acceptance=False)
    engine.run(ZERO, 400)
    assert engine.policy.length == 0
    assert 0 < sum(engine.checked[-200:]) == sum(engine.trace[-201:-1])


def test_trials_count_beside_prompts() -> None:
    """A busy server has a prompt in every step. And nothing is learnt from requests without drafts."""
    engine = Engine(7, dear(0.05))
    engine.run(ZERO, 300)
    assert engine.policy.length == 0
    engine._n, engine.num_prompts = 6, 1  # the last one is a prompt from now on
    before = engine.policy.acceptance.right[6].copy()
    engine.run(HIGH, 60)
    assert engine.policy.length > 0
    assert np.array_equal(engine.policy.acceptance.right[6], before)


def test_a_trial_says_nothing_of_who_has_the_row_next() -> None:
    policy = AdaptiveLength((0, 1), 0, 4, costs_of(in_graphs=True))
    policy.acceptance.usual[:] = 0.0
    policy.move_in(0)
    usual = Composition(("a",), (1,), (0,), (1,), (True,), (0,), 1, 0)
    while policy.next_lengths().make == 0:
        policy.launched(usual)
        policy.collected(usual, [0], [0])
        policy.update()
    assert policy.length == 0, "a trial"
    drafting = Composition(("a",), (1,), (0,), (1,), (True,), (0,), 1, 1)
    policy.launched(drafting)
    policy.collected(drafting, [0], [0])
    policy.move_in(0)  # another, with one token left to compute
    before = policy.acceptance.num_failed[0]
    other = Composition(("b",), (2,), (0,), (1,), (True,), (0,), 1, 0)
    policy.launched(other)
    policy.collected(other, [0], [0])
    policy.update()
    assert policy.acceptance.num_failed[0] == before


def test_elsewhere_it_makes_further_drafts_in_one_step_and_checks_them_in_the_next() -> None:
    engine = Engine(2, dear(0.12))
    engine.run(LOW, 1000)
    made = engine.trace
    trials = [i for i in range(1, 999) if 0 < made[i - 1] == made[i + 1] < made[i]]
    assert trials
    assert all(engine.checked[i + 1] == made[i] for i in trials)


def test_trials_are_rare_where_a_change_of_the_length_costs_as_much_as_a_step() -> None:
    engine = Engine(1, {k: 3e-4 * seconds for k, seconds in dear(0.05).items()})
    engine.run(ZERO, 2200)
    assert engine.policy.length == 0
    assert 28 <= sum(engine.trace[-2000:]) <= 32, "one in sixty-four steps"


def trials(trace: list[int]) -> list[int]:
    """At which steps something was tried, where nothing is usual."""
    return [step for step, made in enumerate(trace) if made]


def test_wrong_trials_come_later_and_later_until_another_request_does() -> None:
    engine = Engine(1, {k: 3e-4 * seconds for k, seconds in dear(0.05).items()})
    engine.run(ZERO, 600)
    assert engine.policy.length == 0
    for _ in range(2):
        engine.policy.move_in(0)
        engine.policy._num_since_trial = 0
        engine.trace.clear()
        engine.run(ZERO, 300)
        # A step until the trial's drafts are proposed, another until they are verified, and the steps in flight.
        gaps = np.diff([0, *trials(engine.trace)])
        assert all(low <= gap <= low + 4 for gap, low in zip(gaps, (16, 32, 64, 64, 64), strict=False)), gaps
        assert len(gaps) >= 4


def test_right_trials_are_followed_by_others_soon() -> None:
    engine = Engine(1, {k: 3e-4 * seconds for k, seconds in dear(0.02).items()})
    engine.run(ZERO, 600)
    engine.policy.move_in(0)
    engine.trace.clear()
    engine.run((0.99,) * 7, 75)
    assert engine.policy.length == 7, "one after the other, five lengths"


def test_steps_that_were_in_flight_when_the_length_fell_are_no_trials() -> None:
    engine = Engine(1, dear(0.05), in_flight=4)
    engine.run(HIGH, 200)
    engine.policy.update()
    before = engine.policy.interval = 8
    engine.policy.longest_interval = 64
    usual = Composition(("a",), (1,), (0,), (4,), (True,), (3,), 4, 3)
    engine.policy.length = 1
    engine.policy.collected(usual, [0], [0])
    engine.policy.update()
    assert engine.policy.interval == before


def test_nothing_is_tried_that_could_not_pay() -> None:
    engine = Engine(8, dear(1.5))
    engine.run(ZERO, 100)
    engine.trace.clear()
    engine.run(ZERO, 300)
    assert sum(engine.trace) == 0


def test_only_lengths_whose_cost_is_known_are_chosen() -> None:
    engine = Engine(4, {0: 1.0, 3: 1.2})
    engine.run(HIGH, 300)
    assert set(engine.trace) <= {0, 3}
    engine.costs.record(8, 7, 1.25)  # a graph for twice the requests serves as well
    engine._cost[7] = 1.25
    engine.run((0.99,) * 7, 100)
    assert engine.policy.length == 7


def test_without_any_cost_the_first_length_stays() -> None:
    policy = AdaptiveLength(CHOICES, 3, 4, StepCosts(in_graphs=True))
    assert policy.next_lengths() == Lengths(3, 3)
    policy.move_in(0)
    composition = Composition(("a",), (1,), (0,), (4,), (True,), (3,), 4, 3)
    for _ in range(200):
        policy.launched(composition)
        policy.collected(composition, [0], [0])
        policy.update()
    assert policy.next_lengths() == Lengths(3, 3)


def test_requests_are_learnt_of_one_by_one() -> None:
    costs = StepCosts(in_graphs=True)
    for k in CHOICES:
        costs.record(8, k, 1.0 + 0.1 * k)
    policy = AdaptiveLength(CHOICES, 3, 8, costs)
    for row in range(8):
        policy.move_in(row)
    both = Composition(("a", "b"), (1, 1), (2, 5), (4, 4), (True, True), (3, 3), 8, 3)
    for _ in range(50):
        policy.launched(both)
        policy.collected(both, [3, 0], [0, 0])
        policy.update()
    # A batch of the request whose drafts are always right drafts many; of the other none.
    policy.launched(Composition(("a",), (1,), (2,), (4,), (True,), (3,), 4, 3))
    assert policy.length >= 3
    policy.launched(Composition(("b", "c"), (1, 1), (5, 5), (4, 4), (True, True), (3, 3), 8, 3))
    assert policy.length == 0
    # Who moves in is taken for the usual one.
    policy.move_in(5)
    assert 0.3 < policy.acceptance.right[5, 0] < 0.7


def test_prompts_beside_decodes_are_not_counted() -> None:
    costs = StepCosts(in_graphs=False)
    policy = AdaptiveLength(CHOICES, 3, 4, costs)
    mixed = Composition(("a", "b"), (1, 1), (0, 1), (4, 30), (True, False), (3, 0), 34, 3)
    before = policy.acceptance.right[1].copy()
    policy.launched(mixed)
    policy.collected(mixed, [0, 0], [0, 0])
    policy.update()
    assert np.array_equal(policy.acceptance.right[1], before)
    assert policy.acceptance.right[0, 0] < before[0]


def test_what_is_not_yet_learnt_of_a_row_is_not_its_next_requests() -> None:
    policy = AdaptiveLength(CHOICES, 3, 2, StepCosts(in_graphs=False))
    step = Composition(("a",), (1,), (0,), (4,), (True,), (3,), 4, 3)
    policy.launched(step)
    before = policy.acceptance.right[0].copy()
    policy.collected(step, [0], [0])
    assert np.array_equal(policy.acceptance.right[0], before), "the device is waiting"
    policy.move_in(0)
    usual = policy.acceptance.right[0].copy()
    policy.update()
    assert np.array_equal(policy.acceptance.right[0], usual)
    assert policy.acceptance.usual[0] < before[0], "but it counts for everybody"


# --- what real steps say ----------------------------------------------------------------------------


def step_of(check: int, make: int, num_reqs: int = 1) -> Composition:
    n = num_reqs
    ids = tuple(map(str, range(n)))
    tokens = (1 + check,) * n
    return Composition(ids, (1,) * n, tuple(range(n)), tokens, (True,) * n, (check,) * n, n * (1 + check), make)


def costs_of(in_graphs: bool) -> StepCosts:
    costs = StepCosts(in_graphs)
    for k in CHOICES:
        costs.record(1, k, 1.0 + 0.5 * k)
    return costs


def test_real_steps_put_the_measurements_right() -> None:
    costs = costs_of(in_graphs=False)
    for _ in range(60):
        costs.observe(1, 2, 1.0)  # measured: 2.0
    assert costs.seconds(1, 2) == pytest.approx(1.0, rel=0.01)
    # The other lengths were never used, so they are taken to be half as long as well.
    assert costs.seconds(1, 0) == pytest.approx(0.5, rel=0.01)
    for _ in range(30):
        costs.observe(1, 0, 1.0)
    assert costs.seconds(1, 0) == pytest.approx(1.0, rel=0.02)
    assert costs.seconds(1, 2) == pytest.approx(1.0, rel=0.4), "half forgotten: the machine may have slowed down"
    costs.observe(1, 0, 1000.0)  # held up
    assert costs.seconds(1, 0) == pytest.approx(1.0, rel=0.1)


def test_what_is_measured_in_graphs_stays() -> None:
    costs = costs_of(in_graphs=True)
    costs.observe(1, 2, 1.0)
    assert costs.seconds(1, 2) == 2.0
    assert StepCosts(in_graphs=False).seconds(1, 0) is None
    StepCosts(in_graphs=False).observe(1, 0, 1.0)  # of which nothing was measured


def test_steps_of_a_trial_are_half_of_each_length() -> None:
    policy = AdaptiveLength(CHOICES, 3, 4, costs_of(in_graphs=False))
    for _ in range(60):
        policy.record_seconds(step_of(0, 0), 1.0)
        for step in (step_of(0, 1), step_of(1, 0)):
            policy.record_seconds(step, 1.1)
    assert policy.costs.seconds(1, 0) == pytest.approx(1.0, rel=0.05)
    assert policy.costs.seconds(1, 1) == pytest.approx(1.2, rel=0.05)  # measured: 1.5


def test_steps_with_prompts_say_nothing_of_drafts() -> None:
    policy = AdaptiveLength(CHOICES, 3, 4, costs_of(in_graphs=False))
    policy.record_seconds(Composition(("a",), (1,), (0,), (9,), (True,), (0,), 9, 0), 9.0)
    policy.record_seconds(Composition(("a", "b"), (1, 1), (0, 1), (1, 9), (True, True), (0, 0), 10, 0), 9.0)
    assert policy.costs.seconds(1, 0) == 1.0


def lengths_on_a_cpu(dear_measured: float, phases: list[tuple[int, float, float]]) -> list[int]:
    """A request alone; phases of steps, how loaded the machine is, and how likely a draft is right. It costs 0.12."""
    costs = StepCosts(in_graphs=False)
    for k in CHOICES:
        costs.record(1, k, 1.0 + dear_measured * k)
    policy = AdaptiveLength(CHOICES, 3, 1, costs)
    policy.move_in(0)
    rng, made, lengths = random.Random(3), 0, []
    for count, load, right in phases:
        for _ in range(count):
            check, make = policy.next_lengths()
            check = min(check, made)
            step, draw = step_of(check, make), rng.random()
            policy.launched(step)
            would_accept = int(draw < right and made > 0 and check == 0)
            policy.collected(step, [sum(draw < right ** (i + 1) for i in range(check))], [would_accept])
            policy.record_seconds(step, load * (1.0 + 0.12 * (check + make) / 2))
            policy.update()
            made = make
            lengths.append(policy.length)
    return lengths


def test_a_length_that_was_measured_too_dear_is_found_nevertheless() -> None:
    """A CPU with noise in the measurement: really a draft costs little."""
    lengths = lengths_on_a_cpu(0.35, [(600, 1.0, 0.6)])
    assert np.mean(lengths[300:]) > 1.5, "two drafts are best, at most one by what was measured"


@pytest.mark.parametrize("load", [1.25, 1.5, 2.0, 3.0])
def test_what_was_learnt_while_others_used_the_machine_is_forgotten(load: float) -> None:
    phases = [(200, load, 0.85), (100, load, 0.2), (100, load, 0.85), (1000, 1.0, 0.85)]
    lengths = lengths_on_a_cpu(0.12, phases)
    assert np.mean(lengths[-300:]) > 4, "seven drafts are best"
    lengths = lengths_on_a_cpu(0.12, [*phases[:3], (1000, 1.0, 0.05)])
    assert np.mean(lengths[-300:]) < 0.5


def test_steps_with_prompts_are_no_trials() -> None:
    policy = AdaptiveLength(CHOICES, 7, 4, costs_of(in_graphs=True))
    policy.move_in(0)
    before = policy.interval
    beside = Composition(("a", "b"), (1, 1), (0, 1), (8, 30), (True, False), (7, 0), 38, 3)
    for accepted in ([7, 0], [0, 0]):
        policy.launched(beside)
        policy.collected(beside, accepted, [0, 0])
        policy.update()
        assert policy.interval == before


def test_a_request_that_comes_makes_no_trial_later() -> None:
    policy = AdaptiveLength(CHOICES, 3, 4, costs_of(in_graphs=True))
    policy.interval = 8
    policy.move_in(0)
    assert policy.interval == 8


# --- drafts in one pass ---------------------------------------------------------------------------------

BLOCK = (0, 1, 2, 3, 5, 7, 11, 15)
PASS = 0.3  # of a block, in steps without drafts


class BlockEngine:
    """One request: a step that proposes anything proposes a block, and pays for all of it."""

    def __init__(self, each: float, seed: int = 0) -> None:
        self._each, self._random = each, random.Random(seed)
        self.costs = StepCosts(in_graphs=True)
        for k in BLOCK:
            self.costs.record(1, k, self.cost(k, k))
        self.policy = AdaptiveLength(BLOCK, 3, 1, self.costs, num_proposed=lambda k: BLOCK[-1] if k else 0)
        self.policy.move_in(0)
        self.made, self.seconds, self.tokens = 0, 0.0, 0

    def cost(self, check: int, make: int) -> float:
        return 1.0 + self._each * check + (PASS if make else 0.0)

    def run(self, p: float, count: int) -> float:
        seconds, tokens = self.seconds, self.tokens
        for _ in range(count):
            check, make = self.policy.next_lengths()
            assert make in (0, BLOCK[-1])
            check = min(check, self.made)
            right = next((i for i in range(BLOCK[-1]) if self._random.random() >= p), BLOCK[-1])
            composition = Composition(("r",), (1,), (0,), (1 + check,), (True,), (check,), 1 + check, make)
            self.policy.launched(composition)
            would = int(right > 0 and self.made > 0 and check == 0)
            self.policy.collected(composition, [min(right, check)], [would])
            self.policy.update()
            self.seconds += self.cost(check, make)
            self.tokens += 1 + min(right, check)
            self.made = make
        return (self.tokens - tokens) / (self.seconds - seconds)

    def best(self, p: float) -> float:
        """By algebra: the tokens of a step with k drafts are 1 + p + ... + p^k."""
        return max(sum(p**i for i in range(k + 1)) / self.cost(k, k) for k in BLOCK)


@pytest.mark.parametrize("each", [0.01, 0.05, 0.2])
@pytest.mark.parametrize("p", [0.0, 0.5, 0.8, 0.93])
def test_of_a_block_as_much_is_checked_as_pays(p: float, each: float) -> None:
    found = []
    for seed in range(4):
        engine = BlockEngine(each, seed)
        engine.run(p, 150)
        found.append(engine.run(p, 1500))
    assert sum(found) / 4 > 0.96 * engine.best(p)


def test_half_a_step_with_a_block_says_nothing_of_other_lengths() -> None:
    """Where any proposal costs the same, a step that checks nothing and proposes a block is no step of either kind."""
    costs = StepCosts(in_graphs=False)
    for k in BLOCK:
        costs.record(1, k, 1.0 + 0.1 * k)
    policy = AdaptiveLength(BLOCK, 3, 1, costs, num_proposed=lambda k: BLOCK[-1] if k else 0)

    def step(check: int, make: int) -> Composition:
        return Composition(("r",), (1,), (0,), (1 + check,), (True,), (check,), 1 + check, make)

    before = {k: costs.seconds(1, k) for k in BLOCK}
    policy.record_seconds(step(0, 15), 9.0)
    policy.record_seconds(step(5, 0), 9.0)
    assert {k: costs.seconds(1, k) for k in BLOCK} == before
    policy.record_seconds(step(5, 15), 3.0)
    assert costs.seconds(1, 5) > before[5]  # type: ignore[operator]
