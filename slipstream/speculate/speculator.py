"""The protocol of drafters, and their inputs: the rows as a step has left them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from slipstream.attention.groups import CacheGroups
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.device.interface import Device, GraphPool
from slipstream.graphs.descriptor import AttentionStatePair, BatchExecutionDescriptor
from slipstream.graphs.manager import GraphMemory
from slipstream.graphs.mode import CUDAGraphMode
from slipstream.kernels.request_rows import RowState
from slipstream.speculate.rejection import DrawnFrom

Int32s = npt.NDArray[np.int32]


class LargestLengths(NamedTuple):
    """The host's numbers for a capture: no batch of its size has larger ones."""

    starts: Int32s  # [num_reqs + 1]: first token of each request, and the end of the last one's
    longest: int
    bounds: Int32s  # [num_reqs]


def largest_lengths(num_reqs: int, num_tokens: int, query_len: int | None, max_len: int) -> LargestLengths:
    """``query_len`` is that of every request; without it, one request may have all the tokens."""
    starts = np.minimum(np.arange(num_reqs + 1, dtype=np.int32) * (query_len or 1), num_tokens)
    starts[-1] = num_tokens
    return LargestLengths(starts, query_len or num_tokens, np.full(num_reqs, max_len, dtype=np.int32))


class TargetAttention(NamedTuple):
    """What the target's captured pass has built for its layers, for a drafter's pass over the same tokens."""

    caches: CacheGroups
    shared: Sequence[Any]


class TargetPass(NamedTuple):
    """The target's pass before the drafts, for drafters that process the same tokens."""

    attention: CommonAttentionMetadata
    positions: Tensor  # [padded_tokens] int64; exact for a request's first token, 0 for unused slots
    all_query_start_loc: Tensor  # [max_reqs + 1] int32; padded with its last value
    decode_len: int | None  # tokens of every request, if each has one known token and drafts
    graph: BatchExecutionDescriptor | None = None  # the pass's graph: its inputs are written up to that size


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """The step's requests, for drafting after the commit. Host numbers are the plan's, device tensors padded."""

    all_rows: Tensor  # [max_reqs] int32; padded with the scratch row
    padded_reqs: int
    # A pass over what the target has computed since the last one: its known tokens, and the new token of each.
    all_start_loc: Tensor  # [max_reqs + 1] int32; padded with its last value
    start_loc_cpu: Int32s  # [num_reqs + 1]
    num_tokens: int  # padded, of that pass
    max_query_len: int
    seq_lens_bound: Int32s  # [num_reqs]: upper bound of each request's tokens after the step
    # The target's own pass, for drafters that process its hidden states.
    step: TargetPass
    num_drafts: int = 0  # maximum drafts of each request
    num_caught_up: int = 0  # maximum tokens of each request in that pass that are older than the step

    @property
    def num_reqs(self) -> int:
        return len(self.seq_lens_bound)

    @property
    def rows(self) -> Tensor:
        return self.all_rows[: self.padded_reqs]

    @property
    def start_loc(self) -> Tensor:
        return self.all_start_loc[: self.padded_reqs + 1]

    @property
    def query_len(self) -> int | None:
        """Tokens of every request in that pass, if they are equal."""
        is_uniform = self.max_query_len * self.num_reqs == int(self.start_loc_cpu[-1])
        return self.max_query_len if is_uniform else None

    def pad(self, num_reqs: int, num_tokens: int) -> DraftBatch:
        """The same requests with padding."""
        return replace(self, padded_reqs=num_reqs, num_tokens=num_tokens)

    def with_target(self, step: TargetPass) -> DraftBatch:
        return replace(self, step=step)

    def after(self, graph: BatchExecutionDescriptor) -> DraftBatch:
        """After the target has run in that graph."""
        return self.with_target(self.step._replace(graph=graph))

    def static(
        self, num_reqs: int, num_tokens: int, query_len: int | None, max_len: int, num_drafts: int
    ) -> DraftBatch:
        """For a capture, which serves every batch of its size."""
        starts, longest, bounds = largest_lengths(num_reqs, num_tokens, query_len, max_len)
        return DraftBatch(
            self.all_rows, num_reqs, self.all_start_loc, starts, num_tokens, longest, bounds, self.step, num_drafts
        )


class GraphSetting(NamedTuple):
    """The target's graphs, as far as a drafter's depend on them."""

    device: Device
    mode: CUDAGraphMode
    sizes: Sequence[int]
    lengths: Sequence[int]  # draft lengths of a step
    max_num_reqs: int
    max_len: int
    pool: GraphPool  # shared, since the two never run at the same time
    memory: GraphMemory
    caches: CacheGroups  # the target's; a drafter with other kinds of backends builds its own metadata
    batch: DraftBatch  # any; captures use its addresses
    # The target's batch of a size, its inputs filled with padding, and the attention states of its capture; None
    # until there is one.
    static: Callable[[BatchExecutionDescriptor], DraftBatch]
    prepare: Callable[[BatchExecutionDescriptor], None]
    states: Callable[[BatchExecutionDescriptor], AttentionStatePair | None]


class Follower(Protocol):
    """How a drafter processes steps that propose nothing, so that its keys have no gaps at the next proposal."""

    def begin_step(self, batch: object, graph: BatchExecutionDescriptor | None) -> None:
        """Before every step, whatever comes after it.

        A batch that repeats is the same object. ``graph``: the graph that contains all of the step and proposes
        nothing; None if something else runs.
        """
        ...

    def record(self, batch: DraftBatch, graph: BatchExecutionDescriptor, *, warmup: bool) -> None:
        """In the capture of that graph, after the commit. Launches only."""
        ...

    def run(self, batch: DraftBatch) -> None:
        """The same, outside of a step's graph."""
        ...

    def settle(self) -> None:
        """Complete deferred work: captures are about to run over padding."""
        ...


class Speculator(Protocol):
    @property
    def drawn_from(self) -> DrawnFrom | None:
        """None if the drafter is deterministic."""
        ...

    @property
    def follower(self) -> Follower | None:
        """None if the drafter ignores steps that propose nothing."""
        ...

    def encode(self, features: Tensor, page_ids: Tensor) -> None:
        """Called when the target's encoder has read a request's input, for a drafter that has an encoder of its own.

        ``page_ids`` are those of the request's row for the output, on the device. Launches only.
        """
        ...

    def taps(self, num_tokens: int) -> Mapping[int, Tensor]:
        """Buffers for the target's residual stream, by number of layers: [num_tokens, hidden] each."""
        ...

    def propose(self, batch: DraftBatch, noise: bool) -> Tensor:
        """Drafts for every request, [padded_reqs, batch.num_drafts] int32, -1 where there is none.

        Reads the rows' lengths on the device. Launches only, so that a step's graph can contain it. Without ``noise``
        every request is greedy.
        """
        ...

    def run(self, batch: DraftBatch, noise: bool) -> Tensor:
        """The same, outside of a step's graph: through its own graphs if it has any."""
        ...

    def step_buffers(self) -> tuple[Tensor, ...]:
        """Memory that every proposal fills. Debug runs poison it before."""
        ...

    def init_graphs(self, setting: GraphSetting) -> Callable[[], bool] | None:
        """Prepare graphs for ``run``; returns a function that captures a missing one, and says whether there was one.

        Nothing is captured before it is called.
        """
        ...


class NoSpeculator:
    """Drafts nothing: plain decoding is the same path with k = 0. A base for drafters without state."""

    drawn_from: DrawnFrom | None = None
    follower: Follower | None = None

    def encode(self, features: Tensor, page_ids: Tensor) -> None:
        pass

    def taps(self, num_tokens: int) -> Mapping[int, Tensor]:
        return {}

    def propose(self, batch: DraftBatch, noise: bool) -> Tensor:
        return batch.rows.new_empty(batch.rows.shape[0], 0)

    def run(self, batch: DraftBatch, noise: bool) -> Tensor:
        return self.propose(batch, noise)

    def step_buffers(self) -> tuple[Tensor, ...]:
        return ()

    def init_graphs(self, setting: GraphSetting) -> Callable[[], bool] | None:
        return None


# From the rows, and the target's caches.
MakeSpeculator = Callable[[RowState, CacheGroups], Speculator]


def draft_nothing(rows: RowState, caches: CacheGroups) -> Speculator:
    return NoSpeculator()
