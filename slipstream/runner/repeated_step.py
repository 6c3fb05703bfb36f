"""Steps that come again, on a device whose launches are calls from Python: recorded once, then replayed.

A batch is prepared once for a composition (``batch.py``), and so are its launches. Only values in device memory change
from step to step, and the host's bounds, which no launch may read here. On a GPU a graph has this part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slipstream.device.interface import Device, Graph
from slipstream.runner.input_batch import InputBatch

# Recording takes as long as two or three steps, so a batch must have come as often to promise to come again.
_RECORDED_AT = 4
# With more tokens, Python's part is little beside the kernels'.
MAX_REPEATED_TOKENS = 16

# An engine whose launches depend on the host's lengths is not tried for ever.
_MAX_FAILURES = 3

LaunchStep = Callable[[InputBatch], Any]


class LaunchRecorder:
    """Records the launches of one engine's steps."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._num_failures = 0

    @property
    def is_useful(self) -> bool:
        return self._num_failures < _MAX_FAILURES

    def record(self, inputs: InputBatch, launch: LaunchStep) -> tuple[Any, Graph | None]:
        """Launch the step. Returns its output, and the graph of it if launches of its kind can be replayed."""
        with self._device.record_launches() as capture:
            output = launch(inputs.watched())
        self._num_failures = self._num_failures + 1 if capture.graph is None else 0
        return output, capture.graph


class RepeatedStep:
    """The launches of one prepared batch."""

    def __init__(self, recorder: LaunchRecorder) -> None:
        self._recorder = recorder
        self._num_runs = 0
        self._graph: Graph | None = None
        self._output: Any = None
        self.was_recorded = False  # in the last run, which took longer for that

    def run(self, inputs: InputBatch, launch: LaunchStep) -> Any:
        """Launch the step, or replay it; its output then is in the same memory every time."""
        self.was_recorded = False
        if self._graph is not None:
            self._graph.replay()
            return self._output
        self._num_runs += 1
        if self._num_runs != _RECORDED_AT:
            return launch(inputs)
        self._output, self._graph = self._recorder.record(inputs, launch)
        self.was_recorded = True
        return self._output


def recorded(device: Device, run: Callable[[], None]) -> Callable[[], None]:
    """The same launches as a repeated step has them, for measuring what it takes."""
    if not device.repeats_launches:
        return run
    run()
    with device.record_launches() as capture:
        run()
    return run if capture.graph is None else capture.graph.replay
