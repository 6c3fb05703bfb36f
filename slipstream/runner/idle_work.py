"""A runner's work before its first step and while the engine is idle: capturing graphs and timing steps."""

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
from slipstream.runner.step_timing import IsInterrupted, StepTimer, quiet

# Share of the device's memory for graphs captured when idle, in addition to those of the start.
_IDLE_GRAPH_BYTES = 2 << 30


class IdleWork:
    def __init__(
        self,
        device: Device,
        program: StepProgram,
        graphs: StepGraphs,
        batches: BatchPreparer,
        timer: StepTimer | None,  # None: costs of steps are not needed
        max_num_reqs: int,
    ) -> None:
        self._device, self._program, self._graphs, self._batches = device, program, graphs, batches
        self.timer = timer
        self._untimed_graphs: deque[BatchExecutionDescriptor] = deque()  # whose timing was interrupted
        self._untimed_launches: deque[tuple[int, int]] = deque()  # requests and drafts of steps without graphs
        if timer is not None and graphs.mode.decode_mode() is not CUDAGraphMode.FULL:
            self._untimed_launches.extend(graphs.plan.launched_steps(max_num_reqs))
        self._record_for_head: Callable[[], bool] | None = graphs.open_head_graphs()
        self._is_done = False

    @property
    def num_left(self) -> int:
        """Above 0 until everything is done, the head's graphs and all timings included."""
        num_left = self._graphs.num_missing + len(self._untimed_graphs) + len(self._untimed_launches)
        return max(num_left, int(not self._is_done))

    @torch.inference_mode()
    def do_first(self) -> None:
        """Before the first step: capture the graphs that are likely to be used, and time them."""
        for desc in self._graphs.record_first():
            if self.timer is not None:
                self.timer.time_graph(desc)
        memory = self._graphs.memory
        memory.limit = memory.used + _IDLE_GRAPH_BYTES
        while self._untimed_launches and self._untimed_launches[0][0] == 1:  # takes about a second; the others later
            assert self.timer is not None
            self.timer.time_launches(*self._untimed_launches.popleft())

    @torch.inference_mode()
    def do_next(self, is_interrupted: IsInterrupted) -> bool:
        """One piece of work, with no step in flight; False if none is left.

        A warm-up really runs, so the last step's batch must not be on the device any more. Timing a step stops as soon
        as ``is_interrupted`` returns true, and begins again the next time.
        """
        if self._is_done:
            return False
        with quiet(self._device):  # waits once more if there turns out to be nothing to record
            self._program.head.settle()
            self._batches.forget_all()
            # Kernels are compiled in a run without filled buffers; library kernels would read stale values in one.
            for buffer in self._program.step_buffers():
                buffer.zero_()
        timer = self.timer
        if self._untimed_graphs:
            assert timer is not None
            if timer.time_graph(self._untimed_graphs[0], is_interrupted):
                self._untimed_graphs.popleft()
        elif (desc := self._graphs.record_next()) is not None:
            if timer is not None and not timer.time_graph(desc, is_interrupted):
                self._untimed_graphs.append(desc)
        elif self._untimed_launches:
            assert timer is not None
            if timer.time_launches(*self._untimed_launches[0], is_interrupted):
                self._untimed_launches.popleft()
        else:
            self._is_done = self._record_for_head is None or not self._record_for_head()
        return not self._is_done
