from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from slipstream.device.cpu import CpuDevice
from slipstream.device.sim import SimDevice
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
    assert clock.num_run <= 52, "somebody may be waiting"


def test_a_cpu_that_serves_others_is_timed_again() -> None:
    clock = Clock(lambda i: 0.05 if i == 1 else 0.02, runs_beside=False)
    assert seconds_of_a_step(clock, clock.run) == pytest.approx(0.02)
    short = Clock(lambda i: 0.001, runs_beside=False)
    assert seconds_of_a_step(short, short.run) == pytest.approx(0.001)
    assert short.num_run == 7


class Onlooker(SimDevice):
    """Sees the tokens of every step that is timed."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.look: Callable[[], torch.Tensor] | None = None
        self.seen: list[list[int]] = []

    def seconds_of(self, run: Callable[[], None]) -> float:
        seconds = super().seconds_of(run)
        if self.look is not None:
            self.seen.append(self.look().tolist())
        return seconds


@pytest.mark.parametrize("mode", ["full", "none"])
def test_steps_are_timed_over_many_tokens(mode: str) -> None:
    """Equal ones take less power, and ask for the same experts. Nothing of them is left behind."""
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "max_model_len": 64, "num_gpu_blocks_override": 64}
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": True}
    world = World(4, {"cudagraph_mode": mode, "speculative_config": drafts, **sizes})
    device = world.device = Onlooker(1)
    core = world._build(world.resolve())
    device.look = lambda: device.peek(core.runner.buffers.input_ids).clone()
    while core.use_idle_time():
        pass
    num_tokens = [len(set(tokens[:4])) for tokens in device.seen]
    assert max(num_tokens) == 4
    assert num_tokens.count(4) > len(num_tokens) // 2, "those of fewer than four tokens have fewer"
    assert not device.peek(core.runner.rows.token_ids[-1]).any()
