from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from slipstream.device.cpu import CpuDevice
from slipstream.device.sim import SimDevice
from slipstream.engine.core import EngineCore
from slipstream.runner.step_timing import seconds_of_a_step
from tests.sim.world import World


class Clock(CpuDevice):
    """Steps take what ``cost`` says of the number of steps before."""

    def __init__(self, cost: Callable[[int], float], runs_beside: bool) -> None:
        super().__init__()
        self.runs_beside, self._cost = runs_beside, cost
        self.num_run, self._now = 0, 0.0

    def run(self) -> None:
        self._now += self._cost(self.num_run)
        self.num_run += 1

    def seconds_of(self, run: Callable[[], None]) -> float:
        begin = self._now
        run()
        return self._now - begin


@pytest.mark.parametrize("seconds", [0.0004, 0.004, 0.015])
def test_a_gpu_is_timed_once_it_has_lowered_its_clocks(seconds: float) -> None:
    clock = Clock(lambda i: seconds * (1.0 if i < 3 else 1.2), runs_beside=True)
    assert seconds_of_a_step(clock, clock.run) == pytest.approx(1.2 * seconds)
    assert clock.num_run <= 52, "a request may be waiting"


def test_a_cpu_that_serves_others_is_timed_again() -> None:
    clock = Clock(lambda i: 0.05 if i == 1 else 0.02, runs_beside=False)
    assert seconds_of_a_step(clock, clock.run) == pytest.approx(0.02)
    short = Clock(lambda i: 0.02 if i in (2, 3, 4) else 0.001, runs_beside=False)
    assert seconds_of_a_step(short, short.run) == pytest.approx(0.001)
    assert short.num_run == 7


class Onlooker(SimDevice):
    """Sees the tokens of every step that is timed."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.inspect: Callable[[], torch.Tensor] | None = None
        self.seen: list[list[int]] = []

    def seconds_of(self, run: Callable[[], None]) -> float:
        seconds = super().seconds_of(run)
        if self.inspect is not None:
            self.seen.append(self.inspect().tolist())
        return seconds


def adaptive_core(device: SimDevice, mode: str) -> EngineCore:
    """With n-gram drafts whose length adapts: steps are timed, in graphs or launch by launch."""
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "max_model_len": 64, "num_gpu_blocks_override": 64}
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": True}
    world = World(4, {"cudagraph_mode": mode, "speculative_config": drafts, **sizes})
    world.device = device
    return world._build(world.resolve())


@pytest.mark.parametrize("mode", ["full", "none"])
def test_steps_are_timed_over_many_tokens(mode: str) -> None:
    """Equal tokens take less power and choose the same experts. None of them are left in the row."""
    device = Onlooker(1)
    core = adaptive_core(device, mode)
    device.inspect = lambda: device.peek(core.runner.buffers.input_ids).clone()
    while core.use_idle_time():
        pass
    num_tokens = [len(set(tokens[:4])) for tokens in device.seen]
    assert max(num_tokens) == 4
    assert num_tokens.count(4) > len(num_tokens) // 2, "those of fewer than four tokens have fewer"
    assert not device.peek(core.runner.rows.token_ids[-1]).any()


def prices_in_idle_time(mode: str, num_wanted: int) -> set[tuple[int, int]]:
    """Requests and drafts of the timed steps, where there was better to do so many times before."""
    device, told = Onlooker(1), set[tuple[int, int]]()
    core = adaptive_core(device, mode)
    idle_work = core.runner.idle_work
    assert idle_work.timer is not None
    idle_work.timer.on_cost = lambda num_reqs, num_drafts, seconds: told.add((num_reqs, num_drafts))
    device.inspect = lambda: torch.zeros(0)
    for _ in range(num_wanted):
        assert core.use_idle_time(lambda: True)
    assert not device.seen
    assert idle_work.num_left > 0
    while core.use_idle_time():
        pass
    assert device.seen
    assert idle_work.num_left == 0
    return told


@pytest.mark.parametrize("mode", ["full", "none"])
def test_no_step_is_timed_while_there_is_better_to_do(mode: str) -> None:
    """Neither after a recording, nor when that is tried again, nor where steps are launched. What gave way is timed
    later, so that no step is left without a price."""
    undisturbed = prices_in_idle_time(mode, num_wanted=0)
    assert len(undisturbed) > 2
    assert prices_in_idle_time(mode, num_wanted=20) == undisturbed
