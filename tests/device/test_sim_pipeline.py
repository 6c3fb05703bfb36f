"""A small engine as the real one works: right values and no false alarm, whatever the pace."""

from __future__ import annotations

import subprocess
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream.device.interface import Event, Graph
from slipstream.device.sim import SimDevice, SimError
from tests.device.sim_setup import SEEDS, upload

SIZE = 8
NUM_STEPS = 12


@dataclass
class Slot:
    """What one step in flight has for itself."""

    staged: Tensor  # pinned
    buffer: Tensor
    output: Tensor  # pinned
    is_staged: Event
    computed: Event
    done: Event


class Pipeline:
    """Step i adds i to a state that stays on the device, and hands the state to the host."""

    def __init__(self, device: SimDevice, depth: int, with_graph: bool) -> None:
        self.device = device
        self.state = upload(device, torch.zeros(SIZE))
        self.step_input = upload(device, torch.zeros(SIZE))
        self.slots = [
            Slot(
                device.pinned_empty((SIZE,), torch.float32),
                torch.empty(SIZE, device="sim"),
                device.pinned_empty((SIZE,), torch.float32),
                *(device.event() for _ in range(3)),
            )
            for _ in range(depth)
        ]
        self.in_flight: deque[Slot] = deque()
        self.graph: Graph | None = None
        self.recorded: Tensor | None = None
        if with_graph:
            with device.sync_guard.allow("capture"):
                with device.warm_up():
                    self.step_input.fill_(0)
                    self._forward()
                with device.record(device.graph_pool()) as capture:
                    self.recorded = self._forward()
                self.graph = capture.graph

    def _forward(self) -> Tensor:
        self.state.add_(self.step_input)
        return torch.where(self.state > 10, self.state * 2, self.state)

    def launch(self, step: int) -> None:
        device, slot = self.device, self.slots[step % len(self.slots)]
        with torch.inference_mode(), device.sync_guard.forbid():
            slot.staged.numpy()[:] = step
            device.poison(self.step_input)
            device.copy_async(self.step_input, slot.staged)
            slot.is_staged.record(device.compute_stream)
            if self.graph is not None:
                self.graph.replay()
            slot.buffer.copy_(self._forward() if self.recorded is None else self.recorded)
            slot.computed.record(device.compute_stream)
            device.copy_stream.wait_event(slot.computed)
            with device.use_stream(device.copy_stream):
                device.copy_async(slot.output, slot.buffer)
                slot.done.record(device.copy_stream)
        self.in_flight.append(slot)

    def collect(self) -> list[float]:
        slot = self.in_flight.popleft()
        with self.device.sync_guard.allow("collect"):
            slot.done.synchronize()
        found: list[float] = slot.output.tolist()
        return found


def expected(step: int) -> list[float]:
    state = step * (step + 1) / 2
    return [state * 2 if state > 10 else state] * SIZE


@pytest.mark.parametrize("with_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_correct_engine_gives_right_values_and_no_alarm(depth: int, with_graph: bool) -> None:
    for seed in SEEDS:
        pipeline = Pipeline(SimDevice(seed), depth, with_graph)
        found = []
        for step in range(NUM_STEPS):
            if len(pipeline.in_flight) == depth:
                found.append(pipeline.collect())
            pipeline.launch(step)
        while pipeline.in_flight:
            found.append(pipeline.collect())
        assert found == [expected(step) for step in range(NUM_STEPS)]


@pytest.mark.parametrize("with_graph", [False, True], ids=["eager", "graph"])
def test_an_engine_that_does_not_wait_for_its_slots_is_caught(with_graph: bool) -> None:
    for seed in SEEDS:
        pipeline = Pipeline(SimDevice(seed), 2, with_graph)
        with pytest.raises(SimError):
            for step in range(NUM_STEPS):
                pipeline.launch(step)


def course(seed: int, with_graph: bool) -> list[tuple[int, ...]]:
    """How far every stream was after each launch."""
    pipeline, progress = Pipeline(SimDevice(seed), 2, with_graph), []
    for step in range(NUM_STEPS):
        if len(pipeline.in_flight) == 2:
            pipeline.collect()
        pipeline.launch(step)
        progress.append(tuple(stream.num_done for stream in pipeline.device.streams))
    return progress


@pytest.mark.parametrize("with_graph", [False, True], ids=["eager", "graph"])
def test_a_seed_replays_an_engine(with_graph: bool) -> None:
    courses = [course(seed, with_graph) for seed in range(10)]
    assert courses == [course(seed, with_graph) for seed in range(10)]
    assert len({tuple(progress) for progress in courses}) > 5


def test_the_first_engine_of_a_process_runs_like_any_other() -> None:
    """What torch imports when it is first used must not keep anything alive, collector or not."""
    program = (
        "import gc; gc.disable()\n"
        "from tests.device.test_sim_pipeline import course\n"
        "assert course(0, False) == course(0, False)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2], check=True)
