"""A step as plain data: what the scheduler decides, and what comes back of it.

Nothing here imports torch or knows how a step is run.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.encoder_input import EncoderInput
from slipstream.output import LogprobRow
from slipstream.pooling import PooledVector
from slipstream.request import Request


class RowStatus(enum.IntEnum):
    """State of a request row on the device. Only RUNNING rows compute; any other value makes the row inert."""

    RUNNING = 0
    STOPPED = 1
    LENGTH = 2
    ERROR = 3
    INERT = 4


class ScheduledRequest(NamedTuple):
    """One request's share of a step."""

    request_id: str
    generation: int  # counts its admissions; outputs of an earlier admission are dropped
    row: int
    num_tokens: int  # query tokens in this step, draft slots included
    num_computed_bound: int  # upper bound of the computed length before this step
    samples: bool  # whether the step reaches the end of the request's tokens and samples new ones
    num_drafts: int = 0  # draft slots among its tokens; the device knows how many are used


@dataclass(frozen=True, slots=True)
class Composition:
    """The requests of a step with their numbers of tokens, as columns.

    Steps with the same composition share one object, so that what is derived from it can be reused.
    """

    request_ids: tuple[str, ...]
    generations: tuple[int, ...]
    rows: tuple[int, ...]
    num_tokens: tuple[int, ...]
    samples: tuple[bool, ...]
    num_drafts: tuple[int, ...]
    total_tokens: int
    num_next_drafts: int = 0  # maximum drafts proposed after the step, for the next one to verify
    lengths_are_exact: bool = False  # launched with no other step in flight, since its attention needs exact lengths
    num_caught_up: int = 0  # maximum tokens before the step's own that the drafter missed and processes now
    num_common_pages: int = field(default=0, compare=False)  # pages of the prefix that cascade attention reads once

    @property
    def num_reqs(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class RowInit:
    """Everything a row needs when it is assigned to a request."""

    row: int
    request: Request
    token_ids: Sequence[int]
    num_computed: int
    draft_start: int = 0  # the drafter's keys are computed from this slot on
    encoder_page_ids: Sequence[int] = ()  # of its encoder's output, all of them


@dataclass(frozen=True, slots=True)
class PageDiff:
    """Pages appended to a row's page table."""

    row: int
    first_idx: int
    page_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class EncoderRun:
    """A pass of the encoder over one request's input. Its output goes to the pages that the request's row names."""

    row: int
    encoder: EncoderInput
    num_entries: int  # of the output


@dataclass(frozen=True, slots=True)
class HostDraft:
    """Draft tokens that the host proposes for a row, from a position on."""

    row: int
    first_idx: int
    token_ids: Sequence[int]


@dataclass(slots=True, eq=False)
class StepPlan:
    """One scheduled step: how many tokens of each row run, and the changes to the device's rows before it."""

    step_id: int
    composition: Composition
    num_computed_bounds: npt.NDArray[np.int32]  # upper bounds before the step
    row_inits: list[RowInit] = field(default_factory=list)
    page_diffs: list[PageDiff] = field(default_factory=list)
    host_drafts: Sequence[HostDraft] = ()  # for this step to verify, of methods that draft on the host
    encoder_runs: Sequence[EncoderRun] = ()  # before the step's tokens, whose requests may be among them

    @classmethod
    def from_requests(cls, step_id: int, requests: Sequence[ScheduledRequest]) -> StepPlan:
        ids, generations, rows, num_tokens, bounds, samples, num_drafts = zip(*requests, strict=True)
        composition = Composition(ids, generations, rows, num_tokens, samples, num_drafts, sum(num_tokens))
        return cls(step_id, composition, np.array(bounds, dtype=np.int32))

    @property
    def num_tokens(self) -> int:
        return self.composition.total_tokens

    @property
    def requests(self) -> list[ScheduledRequest]:
        """The same as a list of objects, built on every access."""
        c, bounds = self.composition, self.num_computed_bounds.tolist()
        columns = (c.request_ids, c.generations, c.rows, c.num_tokens, bounds, c.samples, c.num_drafts)
        return list(map(ScheduledRequest, *columns))


class CertainRun(NamedTuple):
    """Tokens that follow a request's next one, since its grammar allows nothing else: drafts that are accepted."""

    place: int  # of the request in the step
    num_accepted: int  # of the step's drafts: after any other number something else may follow
    token_ids: Sequence[int]


class StepMasks(NamedTuple):
    """Which tokens are allowed at each of a step's logits. Masks are in a pool on the device, by row."""

    rows: npt.NDArray[np.int32]  # [num_logits]: the pool's row of each; -1: every token is allowed
    destinations: Sequence[int]  # rows of the pool that get another mask before
    words: npt.NDArray[np.int32]  # [num new, words]: those masks
    runs: Sequence[CertainRun] = ()  # for the next step to verify


@dataclass(slots=True)
class StepResult:
    """The results of a step, in the order of its plan."""

    plan: StepPlan
    token_ids: list[list[int]]
    statuses: list[RowStatus]
    num_drafts: list[int]  # drafts that were verified
    num_accepted: list[int]  # of those, accepted
    would_accept: list[int]  # 1 if the step skipped a draft that would have been accepted
    logprobs: list[list[LogprobRow]] | None = None  # one for each token, if any request asked
    wait_s: float = 0.0  # how long the host waited for it
    pause_s: float = 0.0  # how long the device waited between the halves of a step with constrained requests
    # By index in the plan: the position of the first, then one for each prompt token from there on.
    prompt_logprobs: dict[int, tuple[int, list[LogprobRow]]] = field(default_factory=dict)
    vectors: dict[int, PooledVector] = field(default_factory=dict)  # of pooled requests that have ended, by place
    # Drafts for the next step, of every request, if one is constrained.
    next_drafts: list[list[int]] | None = None
