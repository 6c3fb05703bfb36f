"""The real engine in simulated worlds. `make sim SEEDS=200` runs more of them, `make sim SEED=7` shows one."""

from __future__ import annotations

import pytest

from slipstream.config import GRAPH_MODES
from tests.sim.test_drafter_failures import EVENTS, SETTINGS
from tests.sim.world import World, run_seed


@pytest.mark.parametrize("seed", range(24))
def test_every_token_is_right_and_nothing_is_unordered(seed: int) -> None:
    run_seed(seed)


@pytest.mark.parametrize("steps_in_flight", [1, 2, 4])
@pytest.mark.parametrize("mode", GRAPH_MODES)
def test_any_number_of_steps_in_flight_in_every_graph_mode(steps_in_flight: int, mode: str) -> None:
    world = run_seed(1000 + steps_in_flight, steps_in_flight=steps_in_flight, cudagraph_mode=mode)
    assert world.core.runner.graphs.mode.value == mode
    assert world.num_steps > 10


@pytest.mark.parametrize(
    ("mode", "num_recorded"), [*(("full", n) for n in range(15, 24)), *(("piecewise", n) for n in (10, 12))]
)
def test_any_part_of_the_graphs_may_be_missing(mode: str, num_recorded: int) -> None:
    """The target's are recorded first, then the drafter's, the largest first."""
    world = World(1, {**SETTINGS, "cudagraph_mode": mode}, EVENTS)
    world.num_recorded = num_recorded
    world.run()


@pytest.mark.parametrize("num_modules", [2, 3])
@pytest.mark.parametrize("mode", GRAPH_MODES)
def test_modules_that_take_turns_in_every_graph_mode(mode: str, num_modules: int) -> None:
    """Each takes what the one before has made of a token, which is kept where the token's keys are: on all pages."""
    speculative = {"method": "mtp", "num_speculative_tokens": 3}
    pages = {"num_gpu_blocks_override": 20}
    world = World(2, {**SETTINGS, **pages, "cudagraph_mode": mode, "speculative_config": speculative}, EVENTS)
    world.head = world.head._replace(taps=(), num_modules=num_modules)
    world.run()
    assert world.num_steps > 10


def test_a_seed_is_a_course_of_events() -> None:
    first, second = World(5), World(5)
    first.run()
    second.run()
    assert first.trace == second.trace
    assert first.device.num_launched == second.device.num_launched
    assert first.device.pace._random.getstate() == second.device.pace._random.getstate()


def test_worlds_differ() -> None:
    worlds = [World(seed) for seed in range(40)]
    assert len({world.options.cudagraph_mode for world in worlds}) == len(GRAPH_MODES)
    assert {world.options.steps_in_flight for world in worlds} == {1, 2, 3, 4}
    assert sum("aborts" in world.events for world in worlds) not in (0, 40)
