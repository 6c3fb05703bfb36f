"""Captures graphs before the first step, and finds the graph that a batch fits into."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, Protocol

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from slipstream.device.interface import Device, Graph, GraphPool
from slipstream.graphs.descriptor import (
    AttentionState,
    AttentionStatePair,
    BatchExecutionDescriptor,
    GraphKind,
    Tier,
)
from slipstream.graphs.mode import CUDAGraphMode
from slipstream.kernels.triton_jit import compile_ahead, compiles_ahead, num_compilers

logger = logging.getLogger("slipstream.graphs")

_SMALL_MIXED = 512  # tokens
DECODES_AND_MIXED = (GraphKind(1), GraphKind(None))


class GraphMemory:
    """Device memory used by graphs, as measured, and its limit."""

    def __init__(self, device: Device, limit: int | None = None) -> None:
        self._device, self.limit = device, limit
        self.used = 0

    @property
    def is_spent(self) -> bool:
        return self.limit is not None and self.used >= self.limit

    @contextmanager
    def measured(self) -> Iterator[None]:
        before = self._device.memory_in_use()
        yield
        self.used += max(0, self._device.memory_in_use() - before)


class Forward(NamedTuple):
    """A forward pass over one descriptor's static inputs, and the attention state it uses."""

    run: Callable[[], None]
    state: AttentionState


class CreateForwardFn(Protocol):
    def __call__(self, desc: BatchExecutionDescriptor, *, warmup: bool) -> Forward:
        """A pass with its own attention state: called once for the warm-up and once more for the capture."""
        ...


class CudaGraphManager:
    """All graphs of one forward pass, largest first, in one memory pool, since they never run at the same time."""

    def __init__(
        self,
        device: Device,
        mode: CUDAGraphMode,
        sizes: Sequence[int],  # to capture: requests of decode batches, tokens of mixed ones
        max_num_reqs: int,
        kinds: Sequence[GraphKind] = DECODES_AND_MIXED,
        pool: GraphPool | None = None,
        # 0: capture before the first step; larger values later, when idle, in this order; None: never
        order: Callable[[BatchExecutionDescriptor], int | None] = lambda _desc: 0,
        memory: GraphMemory | None = None,
    ) -> None:
        self.mode = mode
        self._device = device
        self._pool = pool
        self._memory = memory or GraphMemory(device)
        self._graphs: dict[BatchExecutionDescriptor, Graph] = {}
        self.states: dict[BatchExecutionDescriptor, AttentionStatePair] = {}  # for passes that share them
        ranks = {desc: order(desc) for desc in _descriptors(mode, sorted(set(sizes)), max_num_reqs, kinds)}
        ranked = [(rank, desc) for desc, rank in ranks.items() if rank is not None]
        self.descriptors = [desc for _, desc in ranked]
        # Largest first: later graphs then fit into the memory of earlier ones.
        ranked.sort(key=lambda item: (item[0], -item[1].num_tokens))
        self._urgent = [desc for rank, desc in ranked if rank == 0]
        self._missing = [desc for rank, desc in ranked if rank != 0]
        self._num_compiled = 0  # leading entries of the missing ones whose kernels are compiled
        self._by_kind: dict[GraphKind, list[BatchExecutionDescriptor]] = {}  # sorted by size
        for desc in self._urgent:
            self._offer(desc)

    @property
    def pool(self) -> GraphPool:
        if self._pool is None:
            self._pool = self._device.graph_pool()
        return self._pool

    def dispatch(
        self,
        num_reqs: int,
        num_tokens: int,
        query_len: int | None,
        tier: Tier = "full",
        num_drafts: int = 0,
        attention_inside: bool = True,  # whether a graph may contain the batch's attention
    ) -> BatchExecutionDescriptor:
        """The smallest graph the batch fits into; mode NONE, at the batch's own size, if there is none."""
        for length in (query_len, None) if query_len is not None else (None,):
            found = self._by_kind.get(GraphKind(length, tier, num_drafts), [])
            start = bisect.bisect_left(found, num_tokens, key=_num_tokens)
            for desc in found[start:]:
                if desc.num_reqs >= num_reqs and (attention_inside or desc.mode is not CUDAGraphMode.FULL):
                    return desc
        return BatchExecutionDescriptor(CUDAGraphMode.NONE, num_tokens, num_reqs, tier=tier)

    def capture(
        self, create_forward_fn: CreateForwardFn, progress_bar_desc: str
    ) -> dict[BatchExecutionDescriptor, AttentionStatePair]:
        """Warm up and capture the urgent graphs. Returns their states for passes that share them.

        A piecewise pass captures itself, since it alone knows where its attention layers are.
        """
        self._compile(self._urgent, create_forward_fn)
        return {desc: self.capture_one(desc, create_forward_fn) for desc in self._with_progress(progress_bar_desc)}

    @property
    def num_recorded(self) -> int:
        return len(self.states)

    @property
    def num_missing(self) -> int:
        return len(self._missing)

    def capture_one_more(self, create_forward_fn: CreateForwardFn) -> BatchExecutionDescriptor | None:
        """Capture the next missing graph; None if none is missing. Called when the engine is idle."""
        if not self._missing:
            return None
        if self._memory.is_spent:
            logger.info("graphs use %d MiB; %d more are skipped", self._memory.used >> 20, len(self._missing))
            self._missing.clear()
            return None
        desc = self._missing[0]
        try:
            if self._num_compiled == 0:
                some = self._missing[: num_compilers()]
                self._compile(some, create_forward_fn)
                self._num_compiled = len(some)
            self._num_compiled -= 1
            self.capture_one(desc, create_forward_fn)
        except torch.OutOfMemoryError:
            logger.warning("no memory for more graphs; %d sizes run in larger ones", len(self._missing))
            self._missing.clear()
            return None
        self._offer(desc)
        # Only now: a caller that waits until no graph is missing may need the device for itself.
        self._missing.pop(0)
        return desc

    def _offer(self, desc: BatchExecutionDescriptor) -> None:
        bisect.insort(self._by_kind.setdefault(desc.kind, []), desc, key=_num_tokens)

    def replay(self, desc: BatchExecutionDescriptor) -> None:
        self._graphs[desc].replay()

    def _compile(self, descs: Sequence[BatchExecutionDescriptor], create_forward_fn: CreateForwardFn) -> None:
        """Compile the kernels of these graphs in parallel, which takes far less time than one by one."""
        device = self._device
        if not descs or not compiles_ahead(device.torch_device):
            return
        allowed = device.sync_guard.allow("capture")
        with device.use_stream(device.compute_stream), allowed, device.warm_up(), compile_ahead():
            for desc in descs:
                create_forward_fn(desc, warmup=True).run()

    def capture_one(self, desc: BatchExecutionDescriptor, create_forward_fn: CreateForwardFn) -> AttentionStatePair:
        device = self._device
        with device.use_stream(device.compute_stream), device.sync_guard.allow("capture"), self._memory.measured():
            with device.warm_up():
                warmup = create_forward_fn(desc, warmup=True)
                warmup.run()
            recorded = create_forward_fn(desc, warmup=False)
            if desc.mode is CUDAGraphMode.PIECEWISE:
                recorded.run()
            else:
                with device.record(self.pool) as capture:
                    recorded.run()
                assert capture.graph is not None
                self._graphs[desc] = capture.graph
        self.states[desc] = AttentionStatePair(warmup.state, recorded.state)
        return self.states[desc]

    def _with_progress(self, text: str) -> Iterator[BatchExecutionDescriptor]:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with ExitStack() as stack:
            progress = Progress(*columns, transient=True)
            if progress.console.is_terminal:
                stack.enter_context(progress)
            yield from progress.track(self._urgent, description=text)


def _num_tokens(desc: BatchExecutionDescriptor) -> int:
    return desc.num_tokens


def _descriptors(
    mode: CUDAGraphMode, sizes: Sequence[int], max_num_reqs: int, kinds: Sequence[GraphKind]
) -> Iterator[BatchExecutionDescriptor]:
    """Smallest first. Decode batches pad requests and tokens together; mixed ones may have one token per request.

    A size that no decode batch has is for mixed batches. Of the other sizes mixed batches have only the smaller ones,
    to limit their number.
    """
    decode, mixed = mode.decode_mode(), mode.mixed_mode()
    for size in sizes:
        for query_len, tier, num_drafts in kinds:
            if query_len is not None:
                if decode is CUDAGraphMode.FULL and size <= max_num_reqs:
                    yield BatchExecutionDescriptor(decode, size * query_len, size, query_len, tier, num_drafts)
            elif mixed is not CUDAGraphMode.NONE and (size <= _SMALL_MIXED or size > max_num_reqs):
                yield BatchExecutionDescriptor(mixed, size, min(size, max_num_reqs), None, tier, num_drafts)
