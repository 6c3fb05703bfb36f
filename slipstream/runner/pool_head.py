"""The head that makes vectors: hidden states of pooled requests are gathered, and travel in a ring of their own.

It goes around the head that generates, for requests of both kinds share steps. A pooled request draws nothing and is
never drafted for. Its limit is its prompt, so that ``commit`` ends it on the device with the prompt's last token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from slipstream.columns import Column
from slipstream.device.interface import Event
from slipstream.device.sync_guard import SyncGuard
from slipstream.graphs.descriptor import BatchExecutionDescriptor, Tier
from slipstream.kernels.step.pool import PooledRequests, pool
from slipstream.plan import Composition, RowInit, StepPlan, StepResult
from slipstream.pooling import PooledVector, VectorType
from slipstream.request import Request
from slipstream.runner.async_output import Channel
from slipstream.runner.generate_head import GenerateHead, GenerateWork
from slipstream.runner.input_batch import InputBatch
from slipstream.runner.program import HeadSetting, HeadWork, LaunchedStep, TargetOutput
from slipstream.runner.rings import Ring
from slipstream.runner.token_masks import StagedMasks
from slipstream.speculate.speculator import GraphSetting


def _kind_of(request: Request) -> int:
    return 0 if request.pooling is None else int(request.pooling.kind)


@dataclass(slots=True)
class _Slot:
    vectors: Channel
    computed: Event  # the step has filled the device's side
    event: Event  # the copy to the host's side is done


class _Span(NamedTuple):
    """The pooled requests of a composition, by their indices in the plan."""

    first: int
    last: int  # the index after the last one; others may be between
    ends: tuple[int, ...]  # whose prompts end in the step
    headed: tuple[bool, ...]  # of those, whether the result is what dense layers make of the vector
    is_all: bool  # the step has no request of another kind


class PoolHead:
    columns: ClassVar[tuple[Column, ...]] = (Column("pooling", _kind_of),)

    def __init__(self, setting: HeadSetting) -> None:
        config, device, rows = setting.config, setting.device, setting.rows
        self.generate = GenerateHead(setting)
        self._device, self._rows = device, rows
        self._is_pooled = [False] * rows.num_rows
        self._is_headed = [False] * rows.num_rows
        self.draws = config.model.has_logits
        max_reqs, self._size = config.scheduler.max_num_seqs, config.model.hidden_size
        self._head = setting.model.pooled_head
        size = self._size
        sent = size + (0 if self._head is None else self._head.out_size)
        self.dtype: VectorType = "float64" if config.dtype == "float64" else "float32"
        dtype = getattr(torch, self.dtype)
        torch_device = device.torch_device
        self._kept = torch.zeros(rows.num_rows, size, dtype=dtype, device=torch_device)  # see `pool`
        self._out = torch.zeros(max_reqs, size, dtype=dtype, device=torch_device)
        self.ring = Ring(
            [
                _Slot(
                    Channel(
                        torch.zeros(max_reqs, sent, dtype=dtype, device=torch_device),
                        device.pinned_empty((max_reqs, sent), dtype),
                    ),
                    device.event(),
                    device.event(),
                )
                for _ in range(config.steps_in_flight + 1)
            ]
        )

    def move_in(self, init: RowInit) -> None:
        pooling = init.request.pooling
        self._is_pooled[init.row], self._is_headed[init.row] = (
            pooling is not None,
            pooling is not None and pooling.uses_head,
        )
        self.generate.move_in(init)

    def work_for(self, composition: Composition) -> HeadWork:
        work = self.generate.work_for(composition)
        indices = [i for i, row in enumerate(composition.rows) if self._is_pooled[row]]
        if not indices:
            return work
        ends = tuple(i for i in indices if composition.samples[i])
        headed = tuple(self._is_headed[composition.rows[i]] for i in ends)
        is_all = len(indices) == composition.num_reqs
        return PoolWork(self, work, _Span(indices[0], indices[-1] + 1, ends, headed, is_all))

    # --- launches ---------------------------------------------------------------------------------

    def pool(self, batch: InputBatch, hidden: Tensor, span: _Span) -> Tensor:
        """The vectors of the span's requests; the next step may overwrite them.

        [span, hidden size], and next to each what the dense layers make of it, if there are any.
        """
        part, common, rows = slice(span.first, span.last), batch.attention, self._rows
        out = self._out[: span.last - span.first]
        requests = PooledRequests(
            batch.positions,
            batch.batch_rows[part],
            starts=common.query_start_loc[span.first : span.last + 1],
            query_lens=common.query_lens[part],
        )
        pool(hidden, requests, rows.columns["pooling"], rows.prompt_len, self._kept, out)
        if self._head is None:
            return out
        return torch.cat([out, self._head.project(out)], dim=1)

    def send(self, step: LaunchedStep, vectors: Tensor, span: _Span) -> LaunchedStep:
        """Queue the vectors' way to the host, through the slot's own memory: they may be many."""
        device, slot = self._device, self.ring.acquire()
        slot.vectors.stage(vectors)
        slot.computed.record(device.compute_stream)
        with device.use_stream(device.copy_stream):
            device.copy_stream.wait_event(slot.computed)
            slot.vectors.send(device, vectors.shape[0])
            slot.event.record(device.copy_stream)
        return _PooledStep(step.plan, step, slot, span, self._size, self.dtype, device.sync_guard)

    # --- what the head that generates does --------------------------------------------------------

    def recorded_taps(self, graph: BatchExecutionDescriptor, num_tokens: int) -> Mapping[int, Tensor] | None:
        return self.generate.recorded_taps(graph, num_tokens)

    def record(self, batch: InputBatch, hidden: Tensor, graph: BatchExecutionDescriptor, *, warmup: bool) -> None:
        """Vectors are made after a replay, from the hidden states that it leaves."""
        if self.draws:
            self.generate.record(batch, hidden, graph, warmup=warmup)
        elif graph.tier == "fast":
            self.generate.commit_nothing(batch)

    def run_greedy(self, batch: InputBatch, hidden: Tensor) -> None:
        if self.draws:
            self.generate.run_greedy(batch, hidden)
        else:
            self.generate.commit_nothing(batch)

    def open_graphs(self, setting: GraphSetting) -> Callable[[], bool] | None:
        return self.generate.open_graphs(setting)

    def settle(self) -> None:
        self.generate.settle()

    def step_buffers(self) -> tuple[Tensor, ...]:
        return (*self.generate.step_buffers(), self._out)


@dataclass(frozen=True, slots=True)
class PoolWork:
    """The head's part in the steps of one composition with pooled requests."""

    head: PoolHead
    generate: GenerateWork
    span: _Span

    @property
    def tier(self) -> Tier:
        return self.generate.tier

    @property
    def num_drafts(self) -> int:
        return self.generate.num_drafts

    @property
    def needs_masks(self) -> bool:
        return self.generate.needs_masks

    def begin(self, batch: InputBatch, graph: BatchExecutionDescriptor | None) -> None:
        self.generate.begin(batch, graph)

    def taps(self, num_tokens: int) -> Mapping[int, Tensor] | None:
        return self.generate.taps(num_tokens)

    def run(self, target: TargetOutput, staged: StagedMasks | None = None) -> Any:
        if self.span.is_all:
            self.head.generate.commit_nothing(target.inputs)  # needs no logits
            return None
        return self.generate.run(target, staged)

    def send(self, plan: StepPlan, batch: InputBatch, hidden: Tensor, found: Any) -> LaunchedStep:
        vectors = self.head.pool(batch, hidden, self.span)
        step = self.generate.send(plan, batch, hidden, found)
        return self.head.send(step, vectors, self.span) if self.span.ends else step


@dataclass(slots=True)
class _PooledStep:
    """A step in flight whose results are tokens and vectors."""

    plan: StepPlan
    step: LaunchedStep
    slot: _Slot
    span: _Span
    vector_size: int  # what dense layers have made of a vector comes after it
    dtype: VectorType
    sync_guard: SyncGuard

    def collect(self) -> StepResult:
        result, start = self.step.collect(), time.monotonic()
        with self.sync_guard.allow("collect"):
            self.slot.event.synchronize()
        result.wait_s += time.monotonic() - start
        _, pinned = self.slot.vectors.first(self.span.last - self.span.first)
        found, size = pinned.numpy(), self.vector_size
        for i, is_headed in zip(self.span.ends, self.span.headed, strict=True):
            own = found[i - self.span.first, size:] if is_headed else found[i - self.span.first, :size]
            # Copies: the slot is another step's soon.
            result.vectors[i] = PooledVector(own.tobytes(), self.dtype)
        return result
