"""Captured steps: how a graph of a step is captured, which graph a batch uses, and the results of a replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from slipstream.device.interface import Device
from slipstream.graphs.descriptor import AttentionState, BatchExecutionDescriptor
from slipstream.graphs.manager import CudaGraphManager, Forward, GraphMemory
from slipstream.graphs.mode import CUDAGraphMode, usable_mode
from slipstream.graphs.piecewise import PiecewiseForward
from slipstream.runner.graph_plan import GraphPlan
from slipstream.runner.input_batch import InputBatch
from slipstream.runner.program import HeadWork, StepProgram
from slipstream.speculate.speculator import GraphSetting


class GraphSizes(NamedTuple):
    """Padded sizes of graphs: requests of decode batches, tokens of mixed ones."""

    sizes: Sequence[int]
    max_num_reqs: int

    @property
    def largest_decode(self) -> int:
        return max((size for size in self.sizes if size <= self.max_num_reqs), default=0)


class RecordedStep(NamedTuple):
    """The inputs and results of a captured step, at fixed addresses."""

    inputs: InputBatch
    hidden: Tensor  # [padded_tokens, hidden]


class ChosenGraph(NamedTuple):
    """The graph that a batch runs in."""

    desc: BatchExecutionDescriptor  # of mode NONE if there is none
    recorded: RecordedStep | None  # of a full graph
    holds_step: bool  # the whole step, the head's part included


class StepGraphs:
    """Graphs of one runner's steps. Without any, every batch runs at its own size, launch by launch."""

    def __init__(
        self, device: Device, program: StepProgram, mode: CUDAGraphMode, sizes: GraphSizes, plan: GraphPlan
    ) -> None:
        self._device, self._program = device, program
        self.mode = usable_mode(mode, program.caches.caps)
        self.plan = plan
        self.memory = GraphMemory(device)
        self._sizes = sizes
        self.manager = CudaGraphManager(
            device,
            self.mode,
            sizes.sizes,
            sizes.max_num_reqs,
            kinds=plan.kinds(),
            order=lambda desc: plan.order(desc, sizes.largest_decode),
            memory=self.memory,
        )
        self.recorded: dict[BatchExecutionDescriptor, RecordedStep] = {}
        self.pieces: dict[BatchExecutionDescriptor, PiecewiseForward] = {}

    # --- running a step ---------------------------------------------------------------------------

    def choose(self, batch: InputBatch, work: HeadWork) -> ChosenGraph:
        """The smallest graph that contains the whole step, else one that contains the target's part, else none."""
        common, tier = batch.attention, work.tier
        num_reqs, num_tokens, query_len = common.num_reqs, common.num_actual_tokens, batch.decode_len
        inside = not common.num_common_pages  # their number changes from batch to batch; graphs have none
        desc = self.manager.dispatch(num_reqs, num_tokens, query_len, tier, work.num_drafts, inside)
        if desc.mode is CUDAGraphMode.NONE and tier == "fast":
            desc = self.manager.dispatch(num_reqs, num_tokens, query_len, "full", attention_inside=inside)
        is_full = desc.mode is CUDAGraphMode.FULL
        return ChosenGraph(desc, self.recorded[desc] if is_full else None, is_full and desc.tier == "fast")

    def replay(self, desc: BatchExecutionDescriptor) -> None:
        self.manager.replay(desc)

    def replay_pieces(self, batch: InputBatch, desc: BatchExecutionDescriptor) -> Tensor:
        """The target's forward pass over a padded batch: hidden states."""
        program = self._program
        program.buffers.prepare(batch)
        taps = program.head.recorded_taps(desc, desc.num_tokens)
        return self.pieces[desc].replay(program.context(batch, taps))

    # --- capture ----------------------------------------------------------------------------------

    @property
    def num_recorded(self) -> int:
        """Graphs of whole steps and of the target; a head's own are not counted."""
        return self.manager.num_recorded

    @property
    def num_missing(self) -> int:
        return self.manager.num_missing

    def record_first(self) -> Iterator[BatchExecutionDescriptor]:
        """The graphs that the first steps need."""
        yield from self.manager.capture(self._create_forward, "recording graphs")

    def record_next(self) -> BatchExecutionDescriptor | None:
        """One graph that is missing; None if none is."""
        return self.manager.capture_one_more(self._create_forward)

    def open_head_graphs(self) -> Callable[[], bool] | None:
        """A function that captures one of the head's own graphs per call; None if it has none."""
        if self.mode is CUDAGraphMode.NONE:
            return None
        program, buffers = self._program, self._program.buffers
        return program.head.open_graphs(
            GraphSetting(
                device=self._device,
                mode=self.mode,
                sizes=self._sizes.sizes,
                lengths=self.plan.lengths,
                max_num_reqs=self._sizes.max_num_reqs,
                max_len=buffers.max_model_len,
                pool=self.manager.pool,
                memory=self.memory,
                caches=program.caches,
                batch=buffers.no_drafting,
                static=lambda desc: buffers.static(desc).drafting,
                prepare=lambda desc: buffers.prepare(buffers.static(desc)),
                states=self.manager.states.get,
            )
        )

    def _create_forward(self, desc: BatchExecutionDescriptor, *, warmup: bool) -> Forward:
        program = self._program
        batch = program.buffers.static(desc)
        state = AttentionState(batch)

        def run() -> None:
            program.buffers.prepare(batch)
            context = program.context(batch, program.head.recorded_taps(desc, desc.num_tokens))
            state.metadata = context.shared
            if desc.mode is CUDAGraphMode.PIECEWISE and not warmup:
                pieces = self.pieces[desc] = PiecewiseForward(self._device, self.manager.pool)
                pieces.record(lambda own: program.model.forward(batch.input_ids, own), context)
                return
            hidden = program.model.forward(batch.input_ids, context)
            if desc.mode is CUDAGraphMode.FULL:
                program.head.record(batch, hidden, desc, warmup=warmup)
                if not warmup:
                    self.recorded[desc] = RecordedStep(batch, hidden)

        return Forward(run, state)
