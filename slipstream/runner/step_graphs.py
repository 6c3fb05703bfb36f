"""Graphs of whole steps: which parts of a step a descriptor records, and how a batch runs through one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.attention.backend import Caps
from slipstream.device.interface import Device
from slipstream.graphs.descriptor import AttentionState, BatchExecutionDescriptor, Tier
from slipstream.graphs.manager import CudaGraphManager, Forward
from slipstream.graphs.mode import CUDAGraphMode
from slipstream.graphs.piecewise import PiecewiseForward
from slipstream.runner.input_batch import InputBatch
from slipstream.runner.program import StepProgram, TargetOutput
from slipstream.sampling.sampler import Sampled, SamplingNeeds

_SMALLEST_MIXED = 16  # tokens of the smallest mixed batch that is recorded before the first step
# What a graph with sampling inside can do: greedy and noise at any temperature, row by row.
_FAST_NEEDS = SamplingNeeds(noise=True)


def usable_mode(mode: CUDAGraphMode, caps: Caps) -> CUDAGraphMode:
    """The part of the mode that the backend's attention can be recorded for."""
    if caps.graph_support == "always" or mode in (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE):
        return mode
    if caps.graph_support == "decode":
        return CUDAGraphMode.FULL_AND_PIECEWISE if mode is CUDAGraphMode.FULL else mode
    return CUDAGraphMode.NONE if mode is CUDAGraphMode.FULL_DECODE_ONLY else CUDAGraphMode.PIECEWISE


def _order(desc: BatchExecutionDescriptor, largest_decode: int) -> int:
    """0 for what most first requests need: sampling inside, and sizes of which every batch fits one at twice its own.

    The rest is recorded when the engine is idle; until then such batches run in a larger graph or launch by launch.
    """
    size = desc.num_tokens
    is_mixed = desc.query_len is None
    if size & (size - 1) and (is_mixed or size != largest_decode):
        return 3
    if desc.tier == "fast" and (not is_mixed or size >= _SMALLEST_MIXED):
        return 0
    return 2 if is_mixed else 1


class StepGraphs:
    """Recorded steps of one runner. Without graphs every batch runs at its own size, launch by launch."""

    def __init__(
        self,
        device: Device,
        program: StepProgram,
        mode: CUDAGraphMode,
        sizes: Sequence[int],
        logits: Tensor,  # [max_num_reqs, vocab], where graphs without sampling leave theirs
    ) -> None:
        max_num_reqs = logits.shape[0]
        self._device = device
        self._program = program
        self.mode = usable_mode(mode, program.backend.caps)
        largest = max((size for size in sizes if size <= max_num_reqs), default=0)
        self._manager = CudaGraphManager(
            device,
            self.mode,
            sizes,
            max_num_reqs,
            tiers=("fast", "full"),
            order=lambda desc: _order(desc, largest),
        )
        # Where each recording leaves its hidden states. Logits are large: all recordings that leave any share memory.
        self._hidden: dict[BatchExecutionDescriptor, Tensor] = {}
        self._logits = logits
        self._pieces: dict[BatchExecutionDescriptor, PiecewiseForward] = {}

    @torch.inference_mode()
    def capture(self) -> None:
        self._manager.capture(self._create_forward, "recording graphs")

    @torch.inference_mode()
    def capture_one_more(self) -> bool:
        """With nothing else to do. A warm-up really runs, so the last step's batch must not be there any more."""
        if self._manager.is_complete:
            return False
        with self._device.use_stream(self._device.compute_stream):
            self._program.buffers.stage_nothing()
        return self._manager.capture_one_more(self._create_forward)

    def run(self, batch: InputBatch, needs: SamplingNeeds) -> tuple[Tensor, Sampled | None]:
        """A step over staged rows: hidden states, and the draw unless it happened inside a graph."""
        program, common = self._program, batch.attention
        num_tokens = common.num_actual_tokens
        tier: Tier = "fast" if (needs | _FAST_NEEDS) == _FAST_NEEDS else "full"
        query_len = common.max_query_len if common.max_query_len * common.num_reqs == num_tokens else None
        desc = self._manager.dispatch(common.num_reqs, num_tokens, query_len, tier)
        batch = program.buffers.pad(batch, desc.num_reqs, desc.num_tokens)
        if desc.mode is CUDAGraphMode.FULL:
            self._manager.replay(desc)
            if desc.tier == "fast":
                return self._hidden[desc], None
            target = TargetOutput(self._hidden[desc], self._logits[: desc.num_reqs])
        elif desc.mode is CUDAGraphMode.PIECEWISE:
            program.buffers.prepare(batch)
            target = program.with_logits(batch, self._pieces[desc].replay(program.context(batch)))
        else:
            target = program.target(batch)
        return target.hidden, program.finish(batch, target.logits, needs)

    def _create_forward(self, desc: BatchExecutionDescriptor, *, warmup: bool) -> Forward:
        program = self._program
        batch = program.buffers.static(desc.num_reqs, desc.num_tokens, desc.query_len)
        state = AttentionState(batch)

        def run_pieces() -> None:
            program.buffers.prepare(batch)
            context = program.context(batch)
            state.metadata = context.metadata
            if warmup:
                program.model.forward(batch.input_ids, context)
            else:
                pieces = self._pieces[desc] = PiecewiseForward(self._device, self._manager.pool)
                pieces.record(lambda own: program.model.forward(batch.input_ids, own), context)

        def run_whole() -> None:
            program.buffers.prepare(batch)
            context = program.context(batch)
            state.metadata = context.metadata
            hidden, logits = program.with_logits(batch, program.model.forward(batch.input_ids, context))
            if desc.tier == "fast":
                program.finish(batch, logits, _FAST_NEEDS)
            else:
                self._logits[: desc.num_reqs].copy_(logits)
            if not warmup:
                self._hidden[desc] = hidden

        return Forward(run_pieces if desc.mode is CUDAGraphMode.PIECEWISE else run_whole, state)
