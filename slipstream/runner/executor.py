"""Running one prepared step: as one graph, as a full or piecewise graph of the target, or launch by launch.

On a CPU, launches that come again are replayed (``repeated_step.py``).

The executor knows the target's forward pass. Everything after it is the head's (``program.StepHead``): inside a graph
of the whole step, or launched here.
"""

from __future__ import annotations

from dataclasses import replace

from slipstream.graphs.mode import CUDAGraphMode
from slipstream.runner.batch import PreparedBatch
from slipstream.runner.program import StepProgram, StepRun, TargetOutput
from slipstream.runner.step_graphs import StepGraphs


class StepExecutor:
    def __init__(self, program: StepProgram, graphs: StepGraphs) -> None:
        self._program, self._graphs = program, graphs

    def run(self, batch: PreparedBatch) -> StepRun:
        """Queue the step. Nothing here synchronises with the device."""
        desc, recorded, holds_step = batch.graph
        batch.work.begin(batch.inputs, desc if holds_step else None)
        if holds_step:
            assert recorded is not None
            self._graphs.replay(desc)
            return StepRun(recorded.hidden, None)
        if batch.repeated is None:
            return self._launch(batch)
        found: StepRun = batch.repeated.run(batch.inputs, lambda inputs: self._launch(replace(batch, inputs=inputs)))
        return found

    def _launch(self, batch: PreparedBatch) -> StepRun:
        target = self._run_target(batch)
        return StepRun(target.hidden, batch.work.run(target))

    def run_first_half(self, batch: PreparedBatch) -> TargetOutput:
        """Queue the forward pass alone, of a step whose head waits for the host."""
        batch.work.begin(batch.inputs, None)
        return self._run_target(batch)

    def _run_target(self, batch: PreparedBatch) -> TargetOutput:
        program, inputs, (desc, recorded, _) = self._program, batch.inputs, batch.graph
        if recorded is not None:
            self._graphs.replay(desc)
            return TargetOutput(recorded.hidden, recorded.inputs, inputs, desc)
        if desc.mode is CUDAGraphMode.PIECEWISE:
            # The head may continue in padded memory, as the target did, since the device's batch is padded.
            padded = program.buffers.pad(inputs, desc)
            return TargetOutput(self._graphs.replay_pieces(padded, desc), padded, padded, desc)
        hidden = program.target(inputs, batch.work.taps(inputs.input_ids.shape[0]))
        return TargetOutput(hidden, inputs, inputs, desc)
