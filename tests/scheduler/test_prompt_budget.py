"""Prompts beside decodes, and short prompts among long ones: by a clock that only steps move."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config import CacheConfig, EngineOptions, StepRates
from slipstream.engine.resolve import resolve
from slipstream.errors import ConfigError
from slipstream.plan import ScheduledRequest, StepPlan
from slipstream.request import Request
from slipstream.sampling_params import SamplingParams
from slipstream.scheduler.prompt_budget import PromptBudget, StepRoom
from slipstream.scheduler.scheduler import Scheduler
from slipstream.scheduler.step_model import StepModel, StepWork, count_pairs, work_of
from tests.scheduler.virtual_load import EXPECTED, Arrival, Machine, make_config, serve
from tests.test_config import CPU, MODEL

# What the engine expects of an 8B model on a GPU before it has measured a step.
LIKELY = StepRates(step=6.3e-3, token=32e-6, cached_key=44e-9, pair=2.1e-9, draft=0.4e-3)


def draw_load(num_requests: int, seed: int = 1) -> list[Arrival]:
    rng = random.Random(seed)
    return [Arrival(0.0, rng.randint(100, 2000), rng.randint(50, 400)) for _ in range(num_requests)]


# --- the cost of steps ------------------------------------------------------------------------------


def plan_of(*parts: tuple[int, int, bool], num_proposed: int = 0) -> StepPlan:
    """Of each request: its tokens, those computed before, and whether it decodes."""
    requests = [ScheduledRequest(str(i), 0, i, n, bound, True) for i, (n, bound, _) in enumerate(parts)]
    return StepPlan.from_requests(0, requests)


def test_the_work_of_a_step_is_that_of_its_requests() -> None:
    work, has_prompts = work_of(plan_of((1, 100, True), (1, 50, True), (4, 10, False)))
    # A chunk of 4 after 10: its tokens attend to 11, 12, 13 and 14 keys.
    assert (work, has_prompts) == (StepWork(1, 6, 150, 11 + 12 + 13 + 14, 0), True)
    assert work_of(plan_of((1, 100, True))) == (StepWork(1, 1, 100, 0, 0), False)


def test_costs_are_learnt_whatever_was_expected() -> None:
    """From steps whose seconds are a sum of known rates: the cost of others."""
    true, rng = StepRates(4e-3, 25e-6, 40e-9, 1.5e-9, 0.3e-3), random.Random(0)

    def draw() -> tuple[StepPlan, float]:
        decodes = [(1, rng.randint(1, 4000), True)] * rng.randint(1, 64)
        prompts = [(rng.randint(2, 4000), rng.randint(0, 30_000), False)] * rng.randint(0, 2)
        plan = plan_of(*decodes, *prompts)
        return plan, sum(rate * amount for rate, amount in zip(true, work_of(plan)[0], strict=True))

    for expected in (EXPECTED, LIKELY, *(StepRates(*(factor * rate for rate in LIKELY)) for factor in (0.05, 20.0))):
        model = StepModel(expected)
        for _ in range(200):
            model.observe(*draw())
        for plan, seconds in (draw() for _ in range(50)):
            assert model.seconds(work_of(plan)[0]) == pytest.approx(seconds, rel=0.1)


def test_a_step_that_was_held_up_changes_little_and_hours_of_decoding_change_nothing_for_prompts() -> None:
    machine, model = Machine(), StepModel(LIKELY)
    mixed, decode = plan_of((1, 900, True), (2000, 0, False)), plan_of(*[(1, 900, True)] * 8)
    for _ in range(60):
        model.observe(mixed, machine.seconds(mixed))
        model.observe(decode, machine.seconds(decode))
    before = model.seconds(work_of(mixed)[0])
    assert before == pytest.approx(machine.seconds(mixed), rel=0.02)
    model.observe(mixed, 20.0)  # a kernel was compiled
    assert model.seconds(work_of(mixed)[0]) == pytest.approx(before, rel=0.1)
    for _ in range(1000):
        model.observe(decode, machine.seconds(decode))
        if len(model._unread) > 200:
            model.rates  # noqa: B018  reads them
    assert model.seconds(work_of(mixed)[0]) == pytest.approx(before, rel=0.1)


def test_steps_with_prompts_alone_do_not_raise_the_limit() -> None:
    """They do not tell what an empty step costs, on a machine that is ten times slower than expected."""
    budget = PromptBudget(make_config(step_rates=LIKELY))
    slow = Machine(*(10 * rate for rate in Machine()))
    prompts = plan_of((1000, 0, False))
    for _ in range(30):
        budget.observe(prompts, slow.seconds(prompts))
    assert budget.limit(decodes=True) < 0.08
    decode = plan_of((1, 500, True))
    budget.observe(decode, slow.seconds(decode))
    assert 0.1 < budget.limit(decodes=True) <= 10 * slow.seconds(decode)


# --- the room of a step ------------------------------------------------------------------------------


@given(
    tokens=st.integers(0, 5000),
    seconds=st.floats(-1.0, 2.0) | st.just(math.inf),
    asked=st.integers(1, 6000),
    computed=st.integers(0, 200_000),
    least=st.integers(0, 16),
)
def test_what_fits_is_the_most_that_takes_no_longer(
    tokens: int, seconds: float, asked: int, computed: int, least: int
) -> None:
    room = StepRoom(tokens, seconds, EXPECTED, least)
    found = room.fits(asked, computed)
    assert 0 <= found <= min(asked, tokens)

    def cost(count: int) -> float:
        return EXPECTED.token * count + EXPECTED.pair * count_pairs(count, computed)

    assert cost(found) <= max(0.0, seconds) * (1 + 1e-9) or found == min(least, asked, tokens)
    if found < min(asked, tokens):
        assert found >= least
        assert cost(found + 2) > seconds
    room.take(found, computed)
    assert room.tokens == tokens - found
    assert math.isinf(seconds) or room.seconds == pytest.approx(seconds - cost(found))


# --- under load --------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit_ms", [20, 50, 120])
def test_time_between_tokens_is_held_to_the_limit(limit_ms: int) -> None:
    done = serve(make_config(64, max_itl_s=limit_ms / 1000, step_rates=LIKELY), draw_load(80))
    between = 1000 * done.between_tokens()
    assert np.percentile(between, 99) <= limit_ms
    assert between.max() <= 1.1 * limit_ms
    # And it is used: steps with many prompt tokens are not much shorter.
    mixed = [1000 * s for plan, s in done.steps if plan.num_tokens > plan.composition.num_reqs]
    assert np.percentile(mixed, 90) > 0.85 * limit_ms


def test_the_default_limit_gives_away_little_throughput() -> None:
    """256 requests at once, on a machine with an H200's costs: against a constant, and against full steps."""
    load = draw_load(256)
    constant = serve(make_config(limits_time=False, mixed_prefill_tokens=512), load)
    full = serve(make_config(limits_time=False), load)
    default = serve(make_config(), load)
    assert full.seconds < default.seconds < 1.04 * full.seconds
    assert default.seconds < 0.92 * constant.seconds
    worst = [1000 * float(np.percentile(done.between_tokens(), 99)) for done in (full, default)]
    assert worst[0] > 200 and worst[1] < 80


def test_long_prompts_do_not_keep_short_ones_waiting() -> None:
    """And those do not keep the long ones waiting: they take a few per cent of the steps."""
    rng = random.Random(1)
    long = [Arrival(0.0, 32_768, 16) for _ in range(4)]
    short = [Arrival(rng.uniform(0.2, 5.0), rng.randint(32, 256), 16) for _ in range(100)]
    found = {}
    for name, config in (
        ("default", make_config(step_rates=LIKELY)),
        ("constant", make_config(limits_time=False, mixed_prefill_tokens=512)),
    ):
        done = serve(config, long + short)
        found[name] = (np.percentile(done.first_tokens(256), 99), max(done.first_tokens()))
    assert found["default"][0] < 0.25 < 4 < found["constant"][0]
    assert found["default"][1] < 1.05 * found["constant"][1]


def test_a_constant_stream_of_short_prompts_leaves_half_of_each_step_to_a_long_one() -> None:
    stream = [Arrival(0.02 * i, 900, 2) for i in range(300)]  # more than the machine can do
    done = serve(make_config(64, step_rates=LIKELY), [Arrival(0.05, 32_768, 4), *stream])
    alone = serve(make_config(64, step_rates=LIKELY), [Arrival(0.05, 32_768, 4)])
    assert done.times[0][0] < 3 * alone.times[0][0]


def make_scheduler(pages: int = 3000, rows: int = 40) -> Scheduler:
    return Scheduler(make_config(rows, step_rates=LIKELY), CacheConfig(page_size=16, num_pages=pages + 1))


def request(name: str, prompt_len: int, priority: int = 0) -> Request:
    params = SamplingParams(temperature=0.0, seed=0)
    return Request(name, (7,) * prompt_len, params, (), prompt_len + 8, priority=priority)


def names(scheduler: Scheduler) -> list[str]:
    plan = scheduler.schedule()
    assert plan is not None
    return list(plan.composition.request_ids)


def test_a_burst_of_short_prompts_is_admitted_in_one_step() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("long", 20_000))
    assert names(scheduler) == ["long"]
    for i in range(12):
        scheduler.add(request(f"short {i}", 60))
    assert sorted(names(scheduler)) == sorted(["long", *(f"short {i}" for i in range(12))])


def test_a_short_prompt_passes_waiting_ones_that_need_time_but_not_those_that_need_pages() -> None:
    for pages, passes in ((3000, True), (1255 + 600, False)):
        scheduler = make_scheduler(pages)
        for name in ("first", "second"):
            scheduler.add(request(name, 20_000))
        assert names(scheduler) == ["first"]
        scheduler.add(request("short", 60))
        assert names(scheduler) == (["short", "first"] if passes else ["first"])


def test_a_short_prompt_passes_none_of_higher_priority() -> None:
    scheduler = make_scheduler()
    for name, priority in (("first", 0), ("second", 0), ("short", 1)):
        scheduler.add(request(name, 60 if name == "short" else 20_000, priority))
    assert names(scheduler) == ["first"]


def test_a_limit_below_the_decodes_leaves_prompts_a_little() -> None:
    """Otherwise they would wait for ever."""
    done = serve(make_config(64, max_itl_s=1e-4, step_rates=LIKELY), draw_load(20))
    compositions = [plan.composition for plan, _ in done.steps]
    mixed = [c.total_tokens for c in compositions if c.num_tokens[0] == 1 and c.total_tokens > c.num_reqs]
    assert len(done.times) == 20 and 1 < np.percentile(mixed, 99) < 100


def test_options() -> None:
    def config(**options: object) -> tuple[float | None, bool, int]:
        found = resolve(EngineOptions(**options), CPU, MODEL).scheduler  # type: ignore[arg-type]
        return found.max_itl_s, found.limits_time, found.mixed_prefill_tokens

    assert config() == (None, False, 512)
    assert config(prefer="balance") == (None, True, 512)
    assert config(max_itl_ms=20) == (0.02, True, 512)
    assert config(prefer="throughput", mixed_prefill_tokens=64) == (None, False, 64)
    for wrong in (
        {"max_itl_ms": 0},
        {"max_itl_ms": True},
        {"prefer": "speed"},
        {"max_itl_ms": 5, "prefer": "throughput"},
    ):
        with pytest.raises(ConfigError, match=r"max_itl_ms|prefer"):
            config(**wrong)
