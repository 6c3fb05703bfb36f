"""The domain's nouns as plain data: requests and their parameters, step plans, results.

Imports no torch and knows nothing of how a step runs.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.pooling import PooledVector, PoolingParams
from slipstream.sampling_params import MAX_LOGPROBS, MAX_SEED, SamplingParams

__all__ = [
    "MAX_BAD_WORDS",
    "MAX_BAD_WORD_TOKENS",
    "MAX_DEVICE_STOP_IDS",
    "MAX_LOGPROBS",
    "MAX_SEED",
    "Composition",
    "FinishReason",
    "LogprobRow",
    "PageDiff",
    "Request",
    "RowInit",
    "RowStatus",
    "SamplingParams",
    "ScheduledRequest",
    "StepPlan",
    "StepResult",
    "TokenUpdate",
    "TokenUpdates",
]

FinishReason = Literal["stop", "length", "abort", "error"]


class RowStatus(enum.IntEnum):
    """State of a request row on the device. Only RUNNING rows compute; any other value makes the row inert."""

    RUNNING = 0
    STOPPED = 1
    LENGTH = 2
    ERROR = 3
    INERT = 4


MAX_BAD_WORDS = 32
MAX_BAD_WORD_TOKENS = 8
MAX_DEVICE_STOP_IDS = 16  # checked on the device; the host checks the rest of a longer list


@dataclass(frozen=True, slots=True)
class Request:
    """One request in the engine: a prompt as token ids, with all parameters resolved."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams  # with defaults and a seed filled in
    stop_token_ids: tuple[int, ...]  # end-of-sequence ids included unless they are ignored
    max_total_tokens: int  # prompt and output together; the prompt alone where nothing is drawn
    arrival_time: float = 0.0
    priority: int = 0  # lower runs first
    choice: int = 0  # index among a prompt's choices; part of the key of its noise
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    pooling: PoolingParams | None = None  # it ends with its prompt, in a vector, and no token is drawn

    @property
    def may_use_cache(self) -> bool:
        """Whether the prefix cache may be used.

        Prompt logprobs, and vectors made of more than the last hidden state, need every position computed.
        """
        pools_all = self.pooling is not None and self.pooling.needs_every_position
        return self.params.prompt_logprobs is None and not pools_all

    @property
    def draws(self) -> bool:
        """Whether tokens follow its prompt."""
        return self.pooling is None

    def num_drafts(self, most: int) -> int:
        """Maximum draft length of this request, given the engine's."""
        params = self.params
        if not self.draws:
            return 0
        return 0 if not params.speculate else most if params.max_k is None else min(most, params.max_k)


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


@dataclass(frozen=True, slots=True)
class PageDiff:
    """Pages appended to a row's page table."""

    row: int
    first_idx: int
    page_ids: Sequence[int]


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


class LogprobRow(NamedTuple):
    """Log probabilities at one position: the token in the text first, then the most likely ones in order."""

    rank: int  # of the token in the text; 1 is the most likely
    token_ids: list[int]
    values: list[float]


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
    # By index in the plan: the position of the first, then one for each prompt token from there on.
    prompt_logprobs: dict[int, tuple[int, list[LogprobRow]]] = field(default_factory=dict)
    vectors: dict[int, PooledVector] = field(default_factory=dict)  # of pooled requests that have ended, by place


@dataclass(slots=True)
class TokenUpdate:
    """New tokens of one request. No text yet: detokenising happens outside the engine loop."""

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token or stop string that ended it
    error: str | None = None
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    logprobs: list[LogprobRow] | None = None
    prompt_logprobs: tuple[int, list[LogprobRow]] | None = None
    vector: PooledVector | None = None  # of a pooled request, with its end
    num_drafts: int = 0  # drafts that the step verified
    num_accepted: int = 0  # of those, accepted
    time: float = 0.0  # when the tokens were collected


@dataclass(slots=True)
class TokenUpdates:
    """The updates of a step for each request that has any.

    Most requests only get new tokens and continue. They are stored in columns and not as objects, since a decode
    batch has nothing else.
    """

    request_ids: Sequence[str] = ()
    token_ids: Sequence[list[int]] = ()
    num_drafts: Sequence[int] = ()  # empty if the engine does not speculate
    num_accepted: Sequence[int] = ()
    others: dict[int, TokenUpdate] = field(default_factory=dict)  # updates with more than tokens, by index
    time: float = 0.0  # when the tokens were collected

    @classmethod
    def from_list(cls, updates: Sequence[TokenUpdate]) -> TokenUpdates:
        columns = ([u.request_id for u in updates], [u.token_ids for u in updates])
        drafts = ([u.num_drafts for u in updates], [u.num_accepted for u in updates])
        return cls(*columns, *drafts, dict(enumerate(updates)))

    def __len__(self) -> int:
        return len(self.request_ids)

    def __iter__(self) -> Iterator[TokenUpdate]:
        return map(self.at, range(len(self)))

    def at(self, idx: int) -> TokenUpdate:
        """One update as an object."""
        if (update := self.others.get(idx)) is not None:
            return update
        update = TokenUpdate(self.request_ids[idx], self.token_ids[idx], time=self.time)
        if self.num_drafts:
            update.num_drafts, update.num_accepted = self.num_drafts[idx], self.num_accepted[idx]
        return update

    def set_time(self, now: float) -> None:
        self.time = now
        for update in self.others.values():
            update.time = now

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def ended(self) -> list[str]:
        """Requests that have ended."""
        return [update.request_id for update in self.others.values() if update.finish_reason is not None]
