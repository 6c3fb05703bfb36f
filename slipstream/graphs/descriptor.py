"""Which graph a batch runs in, and the attention state that belongs to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from slipstream.graphs.mode import CUDAGraphMode

# What of sampling is inside the graph: all of it (greedy, temperature, noise), or nothing, because Python cannot branch
# inside a graph on what the requests of the day ask for.
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
    query_len: int | None = None  # of every request, where all have the same; None for mixed batches
    tier: Tier = "full"
    num_drafts: int = 0  # made inside, behind the step; 0 where none are or where they have graphs of their own

    def __post_init__(self) -> None:
        if self.query_len is not None and self.num_reqs * self.query_len != self.num_tokens:
            # Tokens padded and requests not: attention would look for the missing requests' lengths.
            raise ValueError(f"{self.num_tokens} tokens are not {self.num_reqs} requests of {self.query_len}")

    @property
    def kind(self) -> GraphKind:
        return GraphKind(self.query_len, self.tier, self.num_drafts)


@dataclass(slots=True)
class AttentionState:
    """What a forward pass holds for its attention backend. Filled by the backend when the pass first needs it."""

    inputs: Any  # the batch, at fixed addresses
    metadata: Any = None


class AttentionStatePair(NamedTuple):
    """A backend may initialise itself when first run; a recording must contain that, so it has a state of its own."""

    warmup: AttentionState
    captured: AttentionState
