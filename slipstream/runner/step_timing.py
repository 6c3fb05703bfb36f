"""What steps cost: timed over padding, when nothing else runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from slipstream.device.interface import Device
from slipstream.graphs.descriptor import BatchExecutionDescriptor
from slipstream.graphs.mode import CUDAGraphMode
from slipstream.runner.batch import BatchPreparer
from slipstream.runner.program import StepProgram
from slipstream.runner.step_graphs import StepGraphs

_BUSY_S, _MAX_BUSY_STEPS = 0.05, 25  # steps in a row, on a device that runs beside the host
_NUM_TOGETHER, _LONG_S = 5, 0.01  # the same elsewhere; a longer step is timed by itself
_TOKEN_STRIDE = 7919  # between neighbouring tokens of the padding that is timed; a prime, so that all are different

OnCost = Callable[[int, int, float], None]  # requests, drafts of each, seconds
IsWanted = Callable[[], bool]  # whether there is something more urgent to do


def _never() -> bool:
    return False


class StepTimer:
    """Times steps of every draft length, and reports what each costs by its requests and drafts."""

    def __init__(
        self, device: Device, program: StepProgram, graphs: StepGraphs, batches: BatchPreparer, on_cost: OnCost
    ) -> None:
        self._device, self._program, self._graphs, self._batches = device, program, graphs, batches
        self.on_cost = on_cost

    def time_graph(self, desc: BatchExecutionDescriptor, is_wanted: IsWanted = _never) -> bool:
        """False if it gave way to something more urgent."""
        if not self._graphs.plan.gives_cost(desc):
            return True
        assert desc.query_len is not None
        return self._time(desc.num_reqs, desc.query_len - 1, lambda: self._graphs.replay(desc), is_wanted)

    def time_launches(self, num_reqs: int, num_drafts: int, is_wanted: IsWanted = _never) -> bool:
        """The same of a step that is launched one operation at a time."""
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

        is_timed = self._time(num_reqs, num_drafts, run, is_wanted)
        with quiet(self._device):
            self._batches.forget_all()
        return is_timed

    def _time(self, num_reqs: int, num_drafts: int, run: Callable[[], None], is_wanted: IsWanted) -> bool:
        """Over padding: no keys are read, everything else is as in a step."""
        with quiet(self._device), self._distinct_tokens():
            seconds = seconds_of_a_step(self._device, run, is_wanted)
        if seconds is None:
            return False
        self.on_cost(num_reqs, num_drafts, seconds)
        return True

    @contextmanager
    def _distinct_tokens(self) -> Iterator[None]:
        """In the padding's row. Over equal tokens a GPU draws less power and is faster than it is with texts, because
        its power is limited. And equal tokens all choose the same experts.
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
    """Nothing else runs, and what is launched inside has ended when the context has."""
    with device.use_stream(device.compute_stream), device.sync_guard.allow("measure"), device.warm_up():
        yield


class _GaveWay(Exception):  # noqa: N818  not an error
    """There is something more urgent to do."""


def seconds_of_a_step(device: Device, run: Callable[[], None], is_wanted: IsWanted = _never) -> float | None:
    """None if the timing gave way to something more urgent, which is asked for after each run."""

    def run_unless_wanted() -> None:
        if is_wanted():
            raise _GaveWay
        run()

    try:
        run_unless_wanted()  # once for everything that is done once
        return _while_busy(device, run_unless_wanted) if device.runs_beside else _undisturbed(device, run_unless_wanted)
    except _GaveWay:
        return None


def _while_busy(device: Device, run: Callable[[], None]) -> float:
    """Of one step among many: a GPU that computes soon lowers its clocks."""
    seconds = _of_each(device, run, 1)
    for _ in range(2):  # the first time is for its clocks
        seconds = _of_each(device, run, max(1, min(round(_BUSY_S / seconds), _MAX_BUSY_STEPS)))
    return seconds


def _undisturbed(device: Device, run: Callable[[], None]) -> float:
    """The shortest of several times, for other processes may use the CPU as well."""
    seconds = _of_each(device, run, 1)
    if seconds < _LONG_S:
        return _of_each(device, run, _NUM_TOGETHER)
    return min(seconds, *(_of_each(device, run, 1) for _ in range(2)))


def _of_each(device: Device, run: Callable[[], None], count: int) -> float:
    def run_all() -> None:
        for _ in range(count):
            run()

    return device.seconds_of(run_all) / count
