"""Measures the cost of steps on padding, when nothing else runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from slipstream.device.interface import Device
from slipstream.graphs.descriptor import BatchExecutionDescriptor
from slipstream.graphs.mode import CUDAGraphMode
from slipstream.runner.batch import BatchPreparer
from slipstream.runner.program import StepProgram
from slipstream.runner.repeated_step import recorded
from slipstream.runner.step_graphs import StepGraphs

_BUSY_S, _MAX_BUSY_STEPS = 0.05, 25  # consecutive steps, on an asynchronous device
_NUM_SHORT, _NUM_LONG, _LONG_S = 5, 2, 0.01  # on other devices: more times of short steps
_TOKEN_STRIDE = 7919  # between neighbouring tokens of the timed padding; a prime, so that all are different

OnCost = Callable[[int, int, float], None]  # requests, drafts of each, seconds
IsInterrupted = Callable[[], bool]  # whether there is more urgent work


def _never() -> bool:
    return False


class StepTimer:
    """Times steps of every draft length, and reports their cost by requests and drafts."""

    def __init__(
        self, device: Device, program: StepProgram, graphs: StepGraphs, batches: BatchPreparer, on_cost: OnCost
    ) -> None:
        self._device, self._program, self._graphs, self._batches = device, program, graphs, batches
        self.on_cost = on_cost

    def time_graph(self, desc: BatchExecutionDescriptor, is_interrupted: IsInterrupted = _never) -> bool:
        """False if it was interrupted by more urgent work."""
        if not self._graphs.plan.gives_cost(desc):
            return True
        assert desc.query_len is not None
        return self._time(desc.num_reqs, desc.query_len - 1, lambda: self._graphs.replay(desc), is_interrupted)

    def time_launches(self, num_reqs: int, num_drafts: int, is_interrupted: IsInterrupted = _never) -> bool:
        """The same for a step that is launched operation by operation."""
        program, query_len = self._program, 1 + num_drafts
        num_proposed = self._graphs.plan.num_proposed(num_drafts)
        desc = BatchExecutionDescriptor(
            CUDAGraphMode.NONE, num_reqs * query_len, num_reqs, query_len, "fast", num_proposed
        )
        batch = program.buffers.static(desc)
        with self._device.use_stream(self._device.compute_stream):
            self._batches.stage_padding(num_reqs, query_len)

        def run() -> None:
            hidden = program.target(batch, program.head.recorded_taps(desc, desc.num_tokens))
            program.head.run_greedy(batch, hidden)

        if is_interrupted():
            return False
        with quiet(self._device):
            repeated = recorded(self._device, run)
        is_timed = self._time(num_reqs, num_drafts, repeated, is_interrupted)
        with quiet(self._device):
            self._batches.forget_all()
        return is_timed

    def _time(self, num_reqs: int, num_drafts: int, run: Callable[[], None], is_interrupted: IsInterrupted) -> bool:
        """On padding: no keys are read, everything else is as in a real step."""
        with quiet(self._device), self._distinct_tokens():
            seconds = seconds_of_a_step(self._device, run, is_interrupted)
        if seconds is None:
            return False
        self.on_cost(num_reqs, num_drafts, seconds)
        return True

    @contextmanager
    def _distinct_tokens(self) -> Iterator[None]:
        """Fill the padding's row with different tokens. With equal ones a GPU draws less power and is faster than on
        text, because its power is limited; and all equal tokens choose the same experts.
        """
        rows = self._program.buffers.rows
        tokens = rows.token_ids[rows.scratch_row]
        tokens.copy_(torch.arange(len(tokens), device=tokens.device) * _TOKEN_STRIDE % self._program.vocab_size)
        try:
            yield
        finally:
            tokens.zero_()


@contextmanager
def quiet(device: Device) -> Iterator[None]:
    """Nothing else runs inside, and what is launched inside is complete at the end."""
    with device.use_stream(device.compute_stream), device.sync_guard.allow("measure"), device.warm_up():
        yield


class _GaveWay(Exception):  # noqa: N818  not an error
    """There is more urgent work."""


def seconds_of_a_step(device: Device, run: Callable[[], None], is_interrupted: IsInterrupted = _never) -> float | None:
    """None if the timing was interrupted by more urgent work, which is checked after each run."""

    def run_unless_interrupted() -> None:
        if is_interrupted():
            raise _GaveWay
        run()

    try:
        run_unless_interrupted()  # once for one-time work
        return (
            _while_busy(device, run_unless_interrupted)
            if device.runs_beside
            else _undisturbed(device, run_unless_interrupted)
        )
    except _GaveWay:
        return None


def _while_busy(device: Device, run: Callable[[], None]) -> float:
    """The time of one step among many: a GPU lowers its clocks soon after it has become idle."""
    seconds = _of_each(device, run, 1)
    for _ in range(2):  # the first round raises the clocks
        seconds = _of_each(device, run, max(1, min(round(_BUSY_S / seconds), _MAX_BUSY_STEPS)))
    return seconds


def _undisturbed(device: Device, run: Callable[[], None]) -> float:
    """The shortest of several times, since other processes may use the CPU."""
    seconds = _of_each(device, run, 1)
    more = _NUM_SHORT if seconds < _LONG_S else _NUM_LONG
    return min(seconds, *(_of_each(device, run, 1) for _ in range(more)))


def _of_each(device: Device, run: Callable[[], None], count: int) -> float:
    def run_all() -> None:
        for _ in range(count):
            run()

    return device.seconds_of(run_all) / count
