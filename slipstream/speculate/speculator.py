"""The protocol of drafters, and what they are given: the rows as a step has just left them."""

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
    """The host's numbers for a recording: no batch of its size has larger ones."""

    starts: Int32s  # [num_reqs + 1]: where each request's tokens begin, and where the last one's end
    longest: int
    bounds: Int32s  # [num_reqs]


def largest_lengths(num_reqs: int, num_tokens: int, query_len: int | None, max_len: int) -> LargestLengths:
    """``query_len`` is that of every request; where they differ, one of them may have all the tokens."""
    starts = np.minimum(np.arange(num_reqs + 1, dtype=np.int32) * (query_len or 1), num_tokens)
    starts[-1] = num_tokens
    return LargestLengths(starts, query_len or num_tokens, np.full(num_reqs, max_len, dtype=np.int32))


class TargetAttention(NamedTuple):
    """What the target's recorded pass has built for its layers, for a drafter's pass over the same tokens."""

    caches: CacheGroups
    shared: Sequence[Any]


class TargetPass(NamedTuple):
    """The pass of the target that the drafts come after, as far as a drafter goes over the same tokens."""

    attention: CommonAttentionMetadata
    positions: Tensor  # [padded_tokens] int64; of a request's first token exact, of dead ones 0
    all_query_start_loc: Tensor  # [max_reqs + 1] int32; behind the batch stands its last value
    decode_len: int | None  # tokens of every request, where all are one known token and drafts
    graph: BatchExecutionDescriptor | None = None  # that it ran in: its inputs are written up to that size


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """The step's requests, for drafting after the commit. Host numbers are the plan's, device tensors padded."""

    all_rows: Tensor  # [max_reqs] int32; behind the batch stands the scratch row
    padded_reqs: int
    # A pass over what the target has computed since the last one: its known tokens, and one more for the new token.
    all_start_loc: Tensor  # [max_reqs + 1] int32; behind the batch stands its last value
    start_loc_cpu: Int32s  # [num_reqs + 1]
    num_tokens: int  # padded, of that pass
    max_query_len: int
    seq_lens_bound: Int32s  # [num_reqs]: tokens of each request once the step is done, at most
    # The target's own pass, for drafters that go over its hidden states.
    step: TargetPass
    num_drafts: int = 0  # how many to make for each request, at most
    num_caught_up: int = 0  # of that pass's tokens, at most so many of each request are older than the step

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
        """Tokens of every request in that pass, where all have the same."""
        is_uniform = self.max_query_len * self.num_reqs == int(self.start_loc_cpu[-1])
        return self.max_query_len if is_uniform else None

    def pad(self, num_reqs: int, num_tokens: int) -> DraftBatch:
        """The same requests over more memory; what lies behind them is padding."""
        return replace(self, padded_reqs=num_reqs, num_tokens=num_tokens)

    def with_target(self, step: TargetPass) -> DraftBatch:
        return replace(self, step=step)

    def after(self, graph: BatchExecutionDescriptor) -> DraftBatch:
        """After the target has run in that graph."""
        return self.with_target(self.step._replace(graph=graph))

    def static(
        self, num_reqs: int, num_tokens: int, query_len: int | None, max_len: int, num_drafts: int
    ) -> DraftBatch:
        """For a recording, which serves every batch of its size."""
        starts, longest, bounds = largest_lengths(num_reqs, num_tokens, query_len, max_len)
        return DraftBatch(
            self.all_rows, num_reqs, self.all_start_loc, starts, num_tokens, longest, bounds, self.step, num_drafts
        )


class GraphSetting(NamedTuple):
    """The target's graphs, as far as a drafter's are like them."""

    device: Device
    mode: CUDAGraphMode
    sizes: Sequence[int]
    lengths: Sequence[int]  # how many drafts a step may have
    max_num_reqs: int
    max_len: int
    pool: GraphPool  # shared: the two never run at the same time
    memory: GraphMemory
    caches: CacheGroups  # the target's; a drafter whose backends are of other kinds builds metadata of its own
    batch: DraftBatch  # any; recordings read its addresses
    # The target's batch of a size, its inputs filled for nobody, and the attention states of its recording; None until
    # there is one.
    static: Callable[[BatchExecutionDescriptor], DraftBatch]
    prepare: Callable[[BatchExecutionDescriptor], None]
    states: Callable[[BatchExecutionDescriptor], AttentionStatePair | None]


class Follower(Protocol):
    """How a drafter keeps up with steps that propose nothing, so that its next proposal is as good as any."""

    def begin_step(self, batch: object, graph: BatchExecutionDescriptor | None) -> None:
        """Before every step, whatever comes after it.

        A batch that comes again is the same object. ``graph``: the recording that does all of the step and proposes
        nothing; None if something else runs.
        """
        ...

    def record(self, batch: DraftBatch, graph: BatchExecutionDescriptor, *, warmup: bool) -> None:
        """In that recording, after the commit. Launches only."""
        ...

    def run(self, batch: DraftBatch) -> None:
        """The same, outside of a step's graph."""
        ...

    def settle(self) -> None:
        """Put nothing off any longer: recordings are about to run over padding."""
        ...


class Speculator(Protocol):
    @property
    def drawn_from(self) -> DrawnFrom | None:
        """None where the drafter is certain of each draft."""
        ...

    @property
    def follower(self) -> Follower | None:
        """None where steps that propose nothing do not concern it."""
        ...

    def taps(self, num_tokens: int) -> Mapping[int, Tensor]:
        """Where the target is to leave its residual stream, by number of layers: [num_tokens, hidden] each."""
        ...

    def propose(self, batch: DraftBatch, noise: bool) -> Tensor:
        """Drafts for every request, [padded_reqs, batch.num_drafts] int32, -1 where there is none.

        Reads the rows' lengths on the device. Launches only, so that a step's graph can hold it. Without ``noise``
        every request is greedy.
        """
        ...

    def run(self, batch: DraftBatch, noise: bool) -> Tensor:
        """The same, outside of a step's graph: through graphs of its own where it has any."""
        ...

    def step_buffers(self) -> tuple[Tensor, ...]:
        """Memory that every proposal fills anew. Debug runs poison it before."""
        ...

    def init_graphs(self, setting: GraphSetting) -> Callable[[], bool] | None:
        """Prepare graphs for ``run``; gives what records one that is missing, and says whether one was.

        None is recorded before there is time for it.
        """
        ...


class NoSpeculator:
    """Drafts nothing: plain decoding is the same path with k = 0. A base for drafters that keep nothing."""

    drawn_from: DrawnFrom | None = None
    follower: Follower | None = None

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


MakeSpeculator = Callable[[RowState], Speculator]


def draft_nothing(rows: RowState) -> Speculator:
    return NoSpeculator()
