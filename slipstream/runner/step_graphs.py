"""Graphs of whole steps: which parts of a step a descriptor records, and how a batch runs through one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.device.interface import Device
from slipstream.graphs.descriptor import AttentionState, BatchExecutionDescriptor, Tier
from slipstream.graphs.manager import CudaGraphManager, Forward
from slipstream.graphs.mode import CUDAGraphMode, usable_mode
from slipstream.graphs.piecewise import PiecewiseForward
from slipstream.runner.input_batch import InputBatch
from slipstream.runner.program import StepProgram, TargetOutput
from slipstream.sampling.sampler import SamplingNeeds
from slipstream.speculate.speculator import GraphSetting

_SMALLEST_MIXED = 16  # tokens of the smallest mixed batch that is recorded before the first step
# What a graph with sampling inside can do: greedy and noise at any temperature, row by row.
_FAST_NEEDS = SamplingNeeds(noise=True)


def _order(desc: BatchExecutionDescriptor, largest_decode: int, usual_query_len: int) -> int:
    """0 for what most first requests need: sampling inside, and sizes of which every batch fits one at twice its own.

    The rest is recorded when the engine is idle; until then such batches run in a larger graph or launch by launch.
    """
    is_mixed = desc.query_len is None
    size = desc.num_tokens if is_mixed else desc.num_reqs
    if size & (size - 1) and (is_mixed or size != largest_decode):
        return 3
    if desc.query_len not in (None, usual_query_len):
        return 2
    if desc.tier == "fast" and (not is_mixed or size >= _SMALLEST_MIXED):
        return 0
    return 2 if is_mixed else 1


@dataclass(frozen=True, slots=True)
class Drafting:
    """A step has requests to draft for."""

    noise: bool  # one of them is not greedy


class _Choice(NamedTuple):
    """The graph for a batch. As long as the same batch comes again, it is the same."""

    batch: InputBatch
    needs: SamplingNeeds
    drafting: Drafting | None
    desc: BatchExecutionDescriptor
    hidden: Tensor | None  # where a recording that does all of the step leaves its hidden states


class StepGraphs:
    """Recorded steps of one runner. Without graphs every batch runs at its own size, launch by launch."""

    def __init__(
        self,
        device: Device,
        program: StepProgram,
        mode: CUDAGraphMode,
        sizes: Sequence[int],
        max_num_reqs: int,
        num_drafts: int,
        logits: Tensor,  # [most logits of a step, vocab], where graphs without sampling leave theirs
    ) -> None:
        self._device = device
        self._program = program
        self.mode = usable_mode(mode, program.backend.caps)
        self._drafts = num_drafts > 0
        largest, usual = max((size for size in sizes if size <= max_num_reqs), default=0), 1 + num_drafts
        self._manager = CudaGraphManager(
            device,
            self.mode,
            sizes,
            max_num_reqs,
            tiers=("fast", "full"),
            query_lens=sorted({1, usual}),
            order=lambda desc: _order(desc, largest, usual),
        )
        # Where each recording leaves its hidden states. Logits are large: all recordings that leave any share memory.
        self._hidden: dict[BatchExecutionDescriptor, Tensor] = {}
        self._batches: dict[BatchExecutionDescriptor, InputBatch] = {}
        self._logits = logits
        self._pieces: dict[BatchExecutionDescriptor, PiecewiseForward] = {}
        self._is_complete = False
        self._choice: _Choice | None = None  # for the newest step
        if self.mode is not CUDAGraphMode.NONE:
            buffers = program.buffers
            program.speculator.init_graphs(
                GraphSetting(
                    *(device, self.mode, sizes, max_num_reqs, buffers.max_model_len, self._manager.pool),
                    *(buffers.no_drafting, lambda desc: buffers.static(desc).drafting),
                    *(lambda desc: buffers.prepare(buffers.static(desc)), self._manager.states.get),
                )
            )

    @torch.inference_mode()
    def capture(self) -> None:
        self._manager.capture(self._create_forward, "recording graphs")

    @torch.inference_mode()
    def capture_one_more(self) -> bool:
        """With nothing else to do. A warm-up really runs, so the last step's batch must not be there any more."""
        if self._is_complete:
            return False
        self._choice = None
        with self._device.use_stream(self._device.compute_stream):
            self._program.buffers.stage_nothing()
        self._is_complete = not (
            self._manager.capture_one_more(self._create_forward) or self._program.speculator.capture_one_more()
        )
        return not self._is_complete

    def run(self, batch: InputBatch, needs: SamplingNeeds, drafting: Drafting | None) -> tuple[Tensor, Tensor | None]:
        """A step over staged rows: hidden states, and log probabilities if a request wants them."""
        last = self._choice
        if last is None or last.batch is not batch or last.needs is not needs or last.drafting is not drafting:
            last = self._choice = self._choose(batch, needs, drafting)
        program, desc = self._program, last.desc
        if desc.mode is CUDAGraphMode.FULL:
            self._manager.replay(desc)
            if last.hidden is not None:
                return last.hidden, None
            padded, target = self._batches[desc], TargetOutput(self._hidden[desc], self._logits)
        elif desc.mode is CUDAGraphMode.PIECEWISE:
            padded = program.buffers.pad(batch, desc)
            program.buffers.prepare(padded)
            target = program.with_logits(padded, self._pieces[desc].replay(program.context(padded)))
        else:
            padded, target = batch, program.target(batch)
        logprobs = program.finish(padded, target.logits[: padded.logit_indices.shape[0]], needs)
        if drafting:
            # In pieces the drafter's first pass may be padded as the target's; the device's padding is there.
            in_pieces = desc.mode is CUDAGraphMode.PIECEWISE
            drafted = (padded if in_pieces else batch).drafting.behind(desc)
            program.draft(drafted, drafting.noise, in_graph=False)
        return target.hidden, logprobs

    def _choose(self, batch: InputBatch, needs: SamplingNeeds, drafting: Drafting | None) -> _Choice:
        common = batch.attention
        tier: Tier = "fast" if (needs | _FAST_NEEDS) == _FAST_NEEDS else "full"
        # Single tokens of requests that draft are prompts in small chunks: rare, and not what is recorded for decodes.
        query_len = None if drafting and batch.decode_len == 1 else batch.decode_len
        desc = self._manager.dispatch(common.num_reqs, common.num_actual_tokens, query_len, tier)
        is_whole = desc.mode is CUDAGraphMode.FULL and desc.tier == "fast"
        return _Choice(batch, needs, drafting, desc, self._hidden[desc] if is_whole else None)

    def _create_forward(self, desc: BatchExecutionDescriptor, *, warmup: bool) -> Forward:
        program = self._program
        batch = program.buffers.static(desc)
        state = AttentionState(batch)
        drafts = self._drafts and desc.query_len != 1

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
            if desc.tier == "full":
                self._logits[: logits.shape[0]].copy_(logits)
            else:
                program.finish(batch, logits, _FAST_NEEDS)
                if drafts:
                    program.draft(batch.drafting, noise=True, in_graph=True)
            if not warmup:
                self._hidden[desc], self._batches[desc] = hidden, batch

        return Forward(run_pieces if desc.mode is CUDAGraphMode.PIECEWISE else run_whole, state)
