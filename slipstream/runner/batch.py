"""One prepared batch for every step of a composition: inputs, the head's work, and its graph.

A prepared batch is derived from three things, and stays valid while none of them changes:

- **the composition.** It is compared by identity: the scheduler uses one object for equal steps, and the batch keeps a
  reference, so that its id is not reused.
- **the requests in its rows.** A composition names each with the generation of its admission, and a request's
  requirements are fixed when it is assigned to its row. So equal compositions have the same requests.
- **the captured graphs.** Capturing another one is followed by ``forget_all`` before the next step.

Only the lengths of the requests change from step to step. ``prepare`` writes them into the batch's own host arrays,
which are read while that step is launched and not later.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slipstream.plan import Composition, StepPlan
from slipstream.runner.input_batch import InputBatch, InputBuffers
from slipstream.runner.program import HeadWork, StepHead
from slipstream.runner.repeated_step import MAX_REPEATED_TOKENS, LaunchRecorder, RepeatedStep
from slipstream.runner.staging import Int32s
from slipstream.runner.step_graphs import ChosenGraph, StepGraphs

_NUM_KEPT = 8  # recent compositions are kept, since draft lengths alternate


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    composition: Composition
    inputs: InputBatch
    work: HeadWork
    graph: ChosenGraph
    columns: Int32s  # the composition as the row store holds it
    num_tokens: Int32s  # [num_reqs]
    repeated: RepeatedStep | None = None  # its launches, where they are recorded; None: they are not

    def set_lengths(self, plan: StepPlan, max_model_len: int) -> None:
        """The host's numbers for the requests' lengths in this step: bounds, and exact values where they are needed."""
        attention, drafting = self.inputs.attention, self.inputs.drafting
        bounds, exact = attention.seq_lens_cpu_upper_bound, attention.num_computed_cpu
        if exact is not None:
            exact[:] = plan.num_computed_bounds
        np.add(plan.num_computed_bounds, self.num_tokens, out=bounds)
        if drafting.padded_reqs:  # the engine drafts
            np.minimum(bounds + 1, max_model_len, out=drafting.seq_lens_bound)
        np.minimum(bounds, max_model_len, out=bounds)


class BatchPreparer:
    """Prepares the batch of each step and stages it. What has not changed is neither derived nor sent again."""

    def __init__(
        self, buffers: InputBuffers, head: StepHead, graphs: StepGraphs, recorder: LaunchRecorder | None = None
    ) -> None:
        self._buffers, self._rows = buffers, buffers.rows
        self._head, self._graphs = head, graphs
        self._recorder = recorder  # of launches of batches that come again; None: they are not recorded
        self._on_device: PreparedBatch | None = None  # whose composition the row store holds
        self._kept: dict[int, PreparedBatch] = {}  # by id of the composition, oldest first

    def prepare(self, plan: StepPlan) -> PreparedBatch:
        """Flush staged changes, the composition included. The batch holds this step's lengths until the next call."""
        batch, composition = self._on_device, plan.composition
        if batch is None or batch.composition is not composition:
            batch = self._kept.get(id(composition)) or self._derive(composition)
            self._rows.stage_batch(batch.columns)
            self._on_device = batch
        self._rows.flush()
        batch.set_lengths(plan, self._buffers.max_model_len)
        return batch

    @property
    def was_recorded(self) -> bool:
        """Whether the newest step was recorded while it ran, and took longer for that."""
        newest = self._on_device
        return newest is not None and newest.repeated is not None and newest.repeated.was_recorded

    def _derive(self, composition: Composition) -> PreparedBatch:
        buffers, work = self._buffers, self._head.work_for(composition)
        offsets, rows = buffers.offsets(composition), np.array(composition.rows, dtype=np.int32)
        inputs = buffers.batch(composition, offsets)
        batch = PreparedBatch(
            composition,
            inputs,
            work,
            graph=self._graphs.choose(inputs, work),
            columns=self._rows.batch_columns(rows, *offsets),
            num_tokens=np.array(composition.num_tokens, dtype=np.int32),
            repeated=self._repeated(inputs, work),
        )
        if len(self._kept) >= _NUM_KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[id(composition)] = batch
        return batch

    def _repeated(self, inputs: InputBatch, work: HeadWork) -> RepeatedStep | None:
        """For batches whose launches are the same in every step: all requests decode, and sample in the usual way."""
        recorder, is_usual = self._recorder, inputs.decode_len is not None and work.tier == "fast"
        if recorder is None or not recorder.is_useful or not is_usual or work.needs_masks:
            return None
        return RepeatedStep(recorder) if len(inputs.input_ids) <= MAX_REPEATED_TOKENS else None

    def forget_all(self) -> None:
        """Derive every batch anew, and fill the device's batch with padding, as before the first step."""
        self._kept.clear()
        self.stage_padding(0, 0)

    def stage_padding(self, num_reqs: int, query_len: int) -> None:
        """A batch of padding requests on the scratch row, for a step that is only timed."""
        self._on_device = None
        rows, each = np.full(num_reqs, self._rows.scratch_row, dtype=np.int32), np.arange(num_reqs + 1, dtype=np.int32)
        starts = each * np.int32(query_len)
        self._rows.stage_batch(self._rows.batch_columns(rows, starts, starts, each * np.int32(2)))
        self._rows.flush()
