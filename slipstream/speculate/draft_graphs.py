"""Graphs of a draft model's passes, for steps whose own graph does not hold them.

The first pass may run in any mode that the target may. The others are decodes: in one full graph, which holds all of
them, or launched, never in pieces. All share the memory of the target's graphs, for they never run at the same time.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from slipstream.attention.backend import AttentionContext
from slipstream.graphs.descriptor import AttentionState, BatchExecutionDescriptor
from slipstream.graphs.manager import CudaGraphManager, Forward
from slipstream.graphs.mode import CUDAGraphMode
from slipstream.graphs.piecewise import PiecewiseForward
from slipstream.speculate.speculator import DraftBatch, GraphSetting

# Tokens in the first pass of a request that decodes: the one before the new token, and the new one.
_FIRST_QUERY_LEN = 2


class DraftPasses(Protocol):
    """The launches of a drafter, in this order."""

    num_drafts: int

    def first_ids(self, batch: DraftBatch) -> Tensor: ...

    def first_context(self, batch: DraftBatch) -> AttentionContext: ...

    def forward(self, input_ids: Tensor, context: AttentionContext) -> Tensor: ...

    def choose_first(self, batch: DraftBatch, hidden: Tensor, noise: bool) -> None: ...

    def finish(self, batch: DraftBatch, noise: bool) -> Tensor: ...


class DraftGraphs:
    def __init__(self, passes: DraftPasses, setting: GraphSetting) -> None:
        self._passes = passes
        self._setting = setting
        self.first = self._manager(setting.mode, _FIRST_QUERY_LEN)
        has_rest = passes.num_drafts > 1
        self.rest = self._manager(setting.mode.for_draft_decodes() if has_rest else CUDAGraphMode.NONE, 1)
        self._pieces: dict[BatchExecutionDescriptor, PiecewiseForward] = {}
        self._drafts: dict[BatchExecutionDescriptor, Tensor] = {}

    def _manager(self, mode: CUDAGraphMode, query_len: int) -> CudaGraphManager:
        device, _, sizes, max_num_reqs, _, pool, _ = self._setting
        return CudaGraphManager(
            device, mode, sizes, max_num_reqs, query_lens=(query_len,), pool=pool, order=lambda _desc: 1
        )

    def run(self, batch: DraftBatch, noise: bool) -> Tensor:
        passes, num_reqs = self._passes, batch.num_reqs
        desc = self.first.dispatch(num_reqs, int(batch.start_loc_cpu[-1]), batch.query_len)
        rest = self.rest.dispatch(num_reqs, num_reqs, 1)
        # What the later passes read of a request, padding included, the first one has to write.
        fits = desc.mode is CUDAGraphMode.NONE or rest.num_reqs <= desc.num_reqs
        padded = batch.pad(max(desc.num_reqs, rest.num_reqs) if fits else desc.num_reqs, desc.num_tokens)
        if desc.mode is CUDAGraphMode.FULL:
            self.first.replay(desc)
        else:
            ids, context = passes.first_ids(padded), passes.first_context(padded)
            in_pieces = desc.mode is CUDAGraphMode.PIECEWISE
            hidden = self._pieces[desc].replay(context) if in_pieces else passes.forward(ids, context)
            passes.choose_first(padded, hidden, noise)
        if fits and rest.mode is CUDAGraphMode.FULL:
            self.rest.replay(rest)
            return self._drafts[rest]
        return passes.finish(batch.pad(num_reqs, batch.num_tokens), noise)

    @torch.inference_mode()
    def capture_one_more(self) -> bool:
        return self.first.capture_one_more(self._create_first) or self.rest.capture_one_more(self._create_rest)

    def _static(self, desc: BatchExecutionDescriptor) -> DraftBatch:
        setting = self._setting
        return setting.batch.static(desc.num_reqs, desc.num_tokens, desc.query_len, setting.max_len)

    def _create_first(self, desc: BatchExecutionDescriptor, *, warmup: bool) -> Forward:
        passes, batch = self._passes, self._static(desc)
        state = AttentionState(batch)

        def run() -> None:
            ids, context = passes.first_ids(batch), passes.first_context(batch)
            state.metadata = context.metadata
            if desc.mode is CUDAGraphMode.FULL:
                passes.choose_first(batch, passes.forward(ids, context), noise=True)
            elif warmup:
                passes.forward(ids, context)
            else:
                pieces = self._pieces[desc] = PiecewiseForward(self._setting.device, self.first.pool)
                pieces.record(lambda own: passes.forward(ids, own), context)

        return Forward(run, state)

    def _create_rest(self, desc: BatchExecutionDescriptor, *, warmup: bool) -> Forward:
        passes, batch = self._passes, self._static(desc)

        def run() -> None:
            drafts = passes.finish(batch, noise=True)
            if not warmup:
                self._drafts[desc] = drafts

        return Forward(run, AttentionState(batch))
