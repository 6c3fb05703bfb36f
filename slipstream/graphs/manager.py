"""Making graphs before the first step, and finding the one a batch fits into."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import NamedTuple, Protocol

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from slipstream.device.interface import Device, Graph, GraphPool
from slipstream.graphs.descriptor import AttentionState, AttentionStatePair, BatchExecutionDescriptor, Tier
from slipstream.graphs.mode import CUDAGraphMode

logger = logging.getLogger("slipstream.graphs")

_MAX_MIXED_TOKENS = 512


class Forward(NamedTuple):
    """A forward pass over one descriptor's static inputs, and the attention state it uses."""

    run: Callable[[], None]
    state: AttentionState


class CreateForwardFn(Protocol):
    def __call__(self, desc: BatchExecutionDescriptor, *, warmup: bool) -> Forward:
        """A pass with an attention state of its own: called once for the warm-up and once more for the recording."""
        ...


class CudaGraphManager:
    """All graphs of one forward pass, largest first, in one pool of memory: they never run at the same time."""

    def __init__(
        self,
        device: Device,
        mode: CUDAGraphMode,
        sizes: Sequence[int],  # to record: requests of batches of decodes, tokens of mixed ones
        max_num_reqs: int,
        tiers: Sequence[Tier] = ("full",),
        query_lens: Sequence[int] = (1,),  # tokens of a request in batches of decodes
        pool: GraphPool | None = None,
        order: Callable[[BatchExecutionDescriptor], int] = lambda _desc: 0,  # 0: before the first step; else when idle
    ) -> None:
        self.mode = mode
        self._device = device
        self._pool = pool
        self._graphs: dict[BatchExecutionDescriptor, Graph] = {}
        self.states: dict[BatchExecutionDescriptor, AttentionStatePair] = {}  # for passes that share them
        self.descriptors = list(_descriptors(mode, sorted(set(sizes)), max_num_reqs, tiers, query_lens))
        # Largest first: later graphs then fit into the memory of earlier ones.
        ordered = sorted(self.descriptors, key=lambda desc: (order(desc), -desc.num_tokens))
        self._urgent = [desc for desc in ordered if not order(desc)]
        self._missing = [desc for desc in ordered if order(desc)]
        # By what must match exactly; values are sorted by size.
        self._by_kind: dict[tuple[int | None, Tier], list[BatchExecutionDescriptor]] = {}
        for desc in self._urgent:
            self._offer(desc)

    @property
    def pool(self) -> GraphPool:
        if self._pool is None:
            self._pool = self._device.graph_pool()
        return self._pool

    def dispatch(
        self, num_reqs: int, num_tokens: int, query_len: int | None, tier: Tier = "full"
    ) -> BatchExecutionDescriptor:
        """The smallest graph the batch fits into; mode NONE, at the batch's own size, if there is none."""
        kinds = [(query_len, tier)] if query_len is not None else []
        for kind in (*kinds, (None, tier)):
            found = self._by_kind.get(kind, [])
            start = bisect.bisect_left(found, num_tokens, key=_num_tokens)
            for desc in found[start:]:
                if desc.num_reqs >= num_reqs:
                    return desc
        return BatchExecutionDescriptor(CUDAGraphMode.NONE, num_tokens, num_reqs, tier=tier)

    def capture(
        self, create_forward_fn: CreateForwardFn, progress_bar_desc: str
    ) -> dict[BatchExecutionDescriptor, AttentionStatePair]:
        """Warm up and record what is urgent. The states come back for passes that share them.

        A pass in pieces records itself: it alone knows where its attention layers are.
        """
        return {desc: self._capture_one(desc, create_forward_fn) for desc in self._with_progress(progress_bar_desc)}

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to record."""
        return not self._missing

    def capture_one_more(self, create_forward_fn: CreateForwardFn) -> bool:
        """Record the next graph that is still missing; False if none is. For when there is nothing else to do."""
        if self.is_complete:
            return False
        desc = self._missing.pop(0)
        try:
            self._capture_one(desc, create_forward_fn)
        except torch.OutOfMemoryError:
            logger.warning("no memory for more graphs; %d sizes run in larger ones", 1 + len(self._missing))
            self._missing.clear()
            return False
        self._offer(desc)
        return True

    def _offer(self, desc: BatchExecutionDescriptor) -> None:
        bisect.insort(self._by_kind.setdefault((desc.query_len, desc.tier), []), desc, key=_num_tokens)

    def replay(self, desc: BatchExecutionDescriptor) -> None:
        self._graphs[desc].replay()

    def _capture_one(self, desc: BatchExecutionDescriptor, create_forward_fn: CreateForwardFn) -> AttentionStatePair:
        device = self._device
        with device.use_stream(device.compute_stream), device.sync_guard.allow("capture"):
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
    mode: CUDAGraphMode, sizes: Sequence[int], max_num_reqs: int, tiers: Sequence[Tier], query_lens: Sequence[int]
) -> Iterator[BatchExecutionDescriptor]:
    """Smallest first. Batches of decodes pad requests and tokens together; mixed ones may have a token a request.

    A mixed batch with more tokens is long enough for its launches to go unnoticed.
    """
    decode, mixed = mode.decode_mode(), mode.mixed_mode()
    for size in sizes:
        if decode is CUDAGraphMode.FULL and size <= max_num_reqs:
            for query_len in query_lens:
                for tier in tiers:
                    yield BatchExecutionDescriptor(decode, size * query_len, size, query_len, tier)
        if mixed is not CUDAGraphMode.NONE and size <= _MAX_MIXED_TOKENS:
            for tier in tiers:
                yield BatchExecutionDescriptor(mixed, size, min(size, max_num_reqs), tier=tier)
