"""What a runner does before its first step and while the engine is idle: it records graphs and times steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from slipstream.device.interface import Device
from slipstream.graphs.descriptor import BatchExecutionDescriptor
from slipstream.graphs.mode import CUDAGraphMode
from slipstream.runner.batch import BatchPreparer
from slipstream.runner.program import StepProgram
from slipstream.runner.step_graphs import StepGraphs
from slipstream.runner.step_timing import IsWanted, StepTimer, quiet

# Of the device's memory, for what is recorded when idle, beside what was recorded at the start.
_IDLE_GRAPH_BYTES = 2 << 30


class IdleWork:
    def __init__(
        self,
        device: Device,
        program: StepProgram,
        graphs: StepGraphs,
        batches: BatchPreparer,
        timer: StepTimer | None,  # None: what steps cost is of no interest
        max_num_reqs: int,
    ) -> None:
        self._device, self._program, self._graphs, self._batches = device, program, graphs, batches
        self.timer = timer
        self._untimed_graphs: deque[BatchExecutionDescriptor] = deque()  # whose timing gave way
        self._untimed_launches: deque[tuple[int, int]] = deque()  # requests and drafts of steps without graphs
        if timer is not None and graphs.mode.decode_mode() is not CUDAGraphMode.FULL:
            self._untimed_launches.extend(graphs.plan.launched_steps(max_num_reqs))
        self._record_for_head: Callable[[], bool] | None = graphs.open_head_graphs()
        self._is_done = False

    @property
    def num_left(self) -> int:
        """Above 0 until there is nothing left to do, the head's graphs and all timings included."""
        num_left = self._graphs.num_missing + len(self._untimed_graphs) + len(self._untimed_launches)
        return max(num_left, int(not self._is_done))

    @torch.inference_mode()
    def do_first(self) -> None:
        """Before the first step: the graphs that are likely to be used, and what they cost."""
        for desc in self._graphs.record_first():
            if self.timer is not None:
                self.timer.time_graph(desc)
        memory = self._graphs.memory
        memory.limit = memory.used + _IDLE_GRAPH_BYTES
        while self._untimed_launches and self._untimed_launches[0][0] == 1:  # takes a second or so; the others later
            assert self.timer is not None
            self.timer.time_launches(*self._untimed_launches.popleft())

    @torch.inference_mode()
    def do_next(self, is_wanted: IsWanted) -> bool:
        """One thing, with no step in flight; False if nothing is left.

        A warm-up really runs, so the last step's batch must not be on the device any more. Timing a step gives way as
        soon as ``is_wanted``, and is begun again the next time.
        """
        if self._is_done:
            return False
        with quiet(self._device):  # waits once more if there turns out to be nothing to record
            self._program.head.settle()
            self._batches.forget_all()
            # Kernels are compiled in a run that fills nothing, where libraries' own would read what another step left.
            for buffer in self._program.step_buffers():
                buffer.zero_()
        timer = self.timer
        if self._untimed_graphs:
            assert timer is not None
            if timer.time_graph(self._untimed_graphs[0], is_wanted):
                self._untimed_graphs.popleft()
        elif (desc := self._graphs.record_next()) is not None:
            if timer is not None and not timer.time_graph(desc, is_wanted):
                self._untimed_graphs.append(desc)
        elif self._untimed_launches:
            assert timer is not None
            if timer.time_launches(*self._untimed_launches[0], is_wanted):
                self._untimed_launches.popleft()
        else:
            self._is_done = self._record_for_head is None or not self._record_for_head()
        return not self._is_done
