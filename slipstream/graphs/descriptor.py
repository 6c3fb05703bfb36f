"""Which graph a batch runs in, and the attention state that belongs to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from slipstream.graphs.mode import CUDAGraphMode

# Whether sampling is inside the graph: all of it (greedy, temperature, noise), or nothing, because Python cannot branch
# inside a graph on the requests' parameters.
Tier = Literal["fast", "full"]


class GraphKind(NamedTuple):
    """What must match exactly for a batch to run in a graph; sizes may be padded."""

    query_len: int | None = None  # of every request; None: any mix
    tier: Tier = "full"
    num_drafts: int = 0


@dataclass(frozen=True, slots=True)
class BatchExecutionDescriptor:
    """A batch's shape as a graph sees it: padded sizes. ``mode`` is NONE, PIECEWISE or FULL."""

    mode: CUDAGraphMode
    num_tokens: int
    num_reqs: int
    query_len: int | None = None  # of every request; None for mixed batches
    tier: Tier = "full"
    num_drafts: int = 0  # drafts proposed in the graph after the step; 0 if none, or if drafting has its own graphs

    def __post_init__(self) -> None:
        if self.query_len is not None and self.num_reqs * self.query_len != self.num_tokens:
            # With padded tokens but no padded requests, attention would read lengths of missing requests.
            raise ValueError(f"{self.num_tokens} tokens are not {self.num_reqs} requests of {self.query_len}")

    @property
    def kind(self) -> GraphKind:
        return GraphKind(self.query_len, self.tier, self.num_drafts)


@dataclass(slots=True)
class AttentionState:
    """The attention backend's state of a forward pass. Filled by the backend when the pass first needs it."""

    inputs: Any  # the batch, at fixed addresses
    metadata: Any = None


class AttentionStatePair(NamedTuple):
    """A backend may initialise itself in its first run; a graph must contain that, so it has its own state."""

    warmup: AttentionState
    captured: AttentionState
