"""Graphs of a draft model's passes, for steps whose own graph does not contain them.

The first pass may run in any mode of the target. The others are decodes: in one full graph, which contains all of them,
or launched, never piecewise. All share the memory of the target's graphs, since they never run at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from slipstream.attention.context import AttentionContext
from slipstream.attention.groups import CacheGroups
from slipstream.graphs.descriptor import AttentionState, BatchExecutionDescriptor, GraphKind
from slipstream.graphs.manager import CudaGraphManager, Forward
from slipstream.graphs.mode import CUDAGraphMode, draft_modes
from slipstream.graphs.piecewise import PiecewiseForward
from slipstream.speculate.speculator import DraftBatch, GraphSetting, TargetAttention


class FirstSize(NamedTuple):
    """Tokens of a first pass, and those of each request if they are equal."""

    num_tokens: int
    query_len: int | None


class DraftPasses(Protocol):
    """The launches of a drafter, in this order."""

    shares_states: bool  # the first pass processes the target's tokens
    caches: CacheGroups

    def first_size(self, batch: DraftBatch) -> FirstSize: ...

    def first_query_lens(self, lengths: Sequence[int]) -> Sequence[int]: ...

    def rest_lengths(self, lengths: Sequence[int]) -> Sequence[int]: ...

    def static_batch(self, desc: BatchExecutionDescriptor, setting: GraphSetting) -> DraftBatch: ...

    def first_ids(self, batch: DraftBatch) -> Tensor: ...

    def first_context(self, batch: DraftBatch, target: TargetAttention | None = None) -> AttentionContext: ...

    def forward(self, input_ids: Tensor, context: AttentionContext) -> Tensor: ...

    def choose_first(self, batch: DraftBatch, hidden: Tensor, noise: bool) -> None: ...

    def finish(self, batch: DraftBatch, noise: bool) -> Tensor: ...

    def step_buffers(self) -> tuple[Tensor, ...]: ...


class DraftGraphs:
    def __init__(self, passes: DraftPasses, setting: GraphSetting) -> None:
        self._passes = passes
        self._setting = setting
        rest = passes.rest_lengths(setting.lengths)
        modes = draft_modes(setting.mode, has_rest=bool(rest))
        query_lens = passes.first_query_lens(setting.lengths)
        self.first = self._manager(modes.first, [*map(GraphKind, query_lens), GraphKind(None)])
        self.rest = self._manager(modes.rest, [GraphKind(1, "full", k) for k in rest])
        self._pieces: dict[BatchExecutionDescriptor, PiecewiseForward] = {}
        self._drafts: dict[BatchExecutionDescriptor, Tensor] = {}

    def _manager(self, mode: CUDAGraphMode, kinds: Sequence[GraphKind]) -> CudaGraphManager:
        setting = self._setting
        is_adaptive = len(setting.lengths) > 1

        def order(desc: BatchExecutionDescriptor) -> int | None:
            size = desc.num_tokens if desc.query_len is None else desc.num_reqs
            return None if is_adaptive and size & (size - 1) else 1

        return CudaGraphManager(
            setting.device,
            mode,
            setting.sizes,
            setting.max_num_reqs,
            kinds,
            pool=setting.pool,
            order=order,
            memory=setting.memory,
        )

    def run(self, batch: DraftBatch, noise: bool) -> Tensor:
        passes, num_reqs = self._passes, batch.num_reqs
        desc = self._find_first(batch)
        rest = self.rest.dispatch(num_reqs, num_reqs, 1, "full", batch.num_drafts)
        # The first pass writes everything that later passes read of a request, padding included.
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

    def follow(self, batch: DraftBatch) -> bool:
        """By the captured first pass, if there is one: more than necessary, in one launch. Its draft is not placed."""
        desc = self._find_first(batch)
        if desc.mode is not CUDAGraphMode.FULL:
            return False
        self.first.replay(desc)
        return True

    def _find_first(self, batch: DraftBatch) -> BatchExecutionDescriptor:
        num_reqs, size, target = batch.num_reqs, self._passes.first_size(batch), batch.step.graph
        if not self._passes.shares_states and not batch.num_caught_up:
            return self.first.dispatch(num_reqs, *size)
        # A pass over the target's tokens reads what the target's own graph has written, up to its padded size, and its
        # attention state. A larger graph, if that size is not captured yet, would read values of older steps.
        own = None if target is None or batch.num_caught_up else replace(target, tier="full", num_drafts=0)
        if own is not None and own in self.first.states:
            return own
        return BatchExecutionDescriptor(CUDAGraphMode.NONE, size.num_tokens, num_reqs)

    @torch.inference_mode()
    def capture_one_more(self) -> bool:
        found = self.first.capture_one_more(self._create_first) or self.rest.capture_one_more(self._create_rest)
        return found is not None

    def _create_first(self, desc: BatchExecutionDescriptor, *, warmup: bool) -> Forward:
        passes, batch = self._passes, self._passes.static_batch(desc, self._setting)
        # A pass over the target's tokens takes its attention state from the target's capture, and the warm-up from its
        # warm-up: lazily initialised state must be initialised in the capture as well.
        is_shared = passes.shares_states and passes.caches.can_share(self._setting.caches)
        pair = self._setting.states(desc) if is_shared else None
        state = AttentionState(batch) if pair is None else pair.warmup if warmup else pair.captured

        def run() -> None:
            if warmup:
                self._clear()
                if passes.shares_states:
                    self._setting.prepare(desc)
            target = None if pair is None else TargetAttention(self._setting.caches, state.metadata)
            ids, context = passes.first_ids(batch), passes.first_context(batch, target)
            if pair is None:
                state.metadata = context.shared
            if desc.mode is CUDAGraphMode.FULL:
                passes.choose_first(batch, passes.forward(ids, context), noise=True)
            elif warmup:
                passes.forward(ids, context)
            else:
                pieces = self._pieces[desc] = PiecewiseForward(self._setting.device, self.first.pool)
                pieces.record(lambda own: passes.forward(ids, own), context)

        return Forward(run, state)

    def _clear(self) -> None:
        """Before a warm-up, which really runs: it must not read the last step's values, nor write to its slots."""
        for buffer in self._passes.step_buffers():
            buffer.zero_()

    def _create_rest(self, desc: BatchExecutionDescriptor, *, warmup: bool) -> Forward:
        setting, passes = self._setting, self._passes
        batch = setting.batch.static(desc.num_reqs, desc.num_tokens, desc.query_len, setting.max_len, desc.num_drafts)

        def run() -> None:
            if warmup:
                self._clear()
            drafts = passes.finish(batch, noise=True)
            if not warmup:
                self._drafts[desc] = drafts

        return Forward(run, AttentionState(batch))
