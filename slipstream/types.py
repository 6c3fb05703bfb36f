"""The nouns of the domain as plain data: requests and their parameters, step plans, results.

Nothing here imports torch or knows how a step is run.
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
MAX_DEVICE_STOP_IDS = 16  # that the device checks by itself; the host checks the rest of a longer list


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the engine sees it: token ids in, limits resolved, nothing left to guess."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams  # with defaults filled in and a seed drawn
    stop_token_ids: tuple[int, ...]  # end-of-sequence ids included unless they are ignored
    max_total_tokens: int  # prompt and output together; the prompt alone where nothing is drawn
    arrival_time: float = 0.0
    priority: int = 0  # lower runs first
    choice: int = 0  # which of a prompt's continuations this is; part of its noise
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    pooling: PoolingParams | None = None  # it ends with its prompt, in a vector, and no token is drawn

    @property
    def may_use_cache(self) -> bool:
        """Whether cached keys and values may replace computing the prompt.

        Its logprobs, and vectors made of more than the last hidden state, need every position computed.
        """
        pools_all = self.pooling is not None and self.pooling.needs_every_position
        return self.params.prompt_logprobs is None and not pools_all

    @property
    def draws(self) -> bool:
        """Whether tokens follow its prompt."""
        return self.pooling is None

    def num_drafts(self, most: int) -> int:
        """How many tokens may be drafted ahead for it, of the most the engine drafts."""
        params = self.params
        if not self.draws:
            return 0
        return 0 if not params.speculate else most if params.max_k is None else min(most, params.max_k)


class ScheduledRequest(NamedTuple):
    """One request's share of a step."""

    request_id: str
    generation: int  # the number of its admission; an output of an older one is dropped
    row: int
    num_tokens: int  # query tokens in this step, places for drafts included
    num_computed_bound: int  # computed length before this step, never below the device's
    samples: bool  # whether the step reaches the end of the request's tokens and so draws new ones
    num_drafts: int = 0  # places for drafts among its tokens; how many there are the device knows


@dataclass(frozen=True, slots=True)
class Composition:
    """Who is in a step with how many tokens, as columns.

    Steps that have the same share one object: what was derived from it holds for as long as it comes again.
    """

    request_ids: tuple[str, ...]
    generations: tuple[int, ...]
    rows: tuple[int, ...]
    num_tokens: tuple[int, ...]
    samples: tuple[bool, ...]
    num_drafts: tuple[int, ...]
    total_tokens: int
    num_next_drafts: int = 0  # most drafts that are made behind the step, for the next one to check
    lengths_are_exact: bool = False  # it is launched with no other under way, for its attention wants to know them
    num_caught_up: int = 0  # most tokens of each before the step's own that the drafter, who missed them, goes over too
    num_common_pages: int = field(default=0, compare=False)  # that all begin with and attention is to read once

    @property
    def num_reqs(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class RowInit:
    """Everything a row needs when a request moves in."""

    row: int
    request: Request
    token_ids: Sequence[int]
    num_computed: int
    draft_start: int = 0  # the first slot from which on the drafter's keys are among those computed


@dataclass(frozen=True, slots=True)
class PageDiff:
    """Pages appended to a row's page table."""

    row: int
    first_idx: int
    page_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class HostDraft:
    """What the host takes to come in a row's text, from a position on."""

    row: int
    first_idx: int
    token_ids: Sequence[int]


@dataclass(slots=True, eq=False)
class StepPlan:
    """One step, decided: which rows run how many tokens, and what changes on the device before."""

    step_id: int
    composition: Composition
    num_computed_bounds: npt.NDArray[np.int32]  # of each request, before the step
    row_inits: list[RowInit] = field(default_factory=list)
    page_diffs: list[PageDiff] = field(default_factory=list)
    host_drafts: Sequence[HostDraft] = ()  # for this step to check, of methods that think on the host

    @classmethod
    def of(cls, step_id: int, requests: Sequence[ScheduledRequest]) -> StepPlan:
        ids, generations, rows, num_tokens, bounds, samples, num_drafts = zip(*requests, strict=True)
        composition = Composition(ids, generations, rows, num_tokens, samples, num_drafts, sum(num_tokens))
        return cls(step_id, composition, np.array(bounds, dtype=np.int32))

    @property
    def num_tokens(self) -> int:
        return self.composition.total_tokens

    @property
    def requests(self) -> list[ScheduledRequest]:
        """The same request by request, made anew by every look."""
        c, bounds = self.composition, self.num_computed_bounds.tolist()
        columns = (c.request_ids, c.generations, c.rows, c.num_tokens, bounds, c.samples, c.num_drafts)
        return list(map(ScheduledRequest, *columns))


class LogprobRow(NamedTuple):
    """Log probabilities at one position: the token that stands there first, then the likeliest in order."""

    rank: int  # of the token that stands there; 1 is the likeliest
    token_ids: list[int]
    values: list[float]


@dataclass(slots=True)
class StepResult:
    """What a finished step produced, in the order of its plan."""

    plan: StepPlan
    token_ids: list[list[int]]
    statuses: list[RowStatus]
    num_drafts: list[int]  # drafts that were checked
    num_accepted: list[int]  # of those, accepted
    foreseen: list[int]  # 1 where a draft was there that the step did not check, and it would have been accepted
    logprobs: list[list[LogprobRow]] | None = None  # one for each token, where any request asked
    wait_s: float = 0.0  # how long the host waited for it
    # By place in the plan: the position of the first, then one for each prompt token from there on.
    prompt_logprobs: dict[int, tuple[int, list[LogprobRow]]] = field(default_factory=dict)
    vectors: dict[int, PooledVector] = field(default_factory=dict)  # of pooled requests that have ended, by place


@dataclass(slots=True)
class TokenUpdate:
    """New tokens of one request, as the engine loop hands them on. No text yet: detokenising is off the loop."""

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token or stop string that ended it
    error: str | None = None
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    logprobs: list[LogprobRow] | None = None
    prompt_logprobs: tuple[int, list[LogprobRow]] | None = None
    vector: PooledVector | None = None  # of a pooled request, with its end
    num_drafts: int = 0  # drafts that the step checked
    num_accepted: int = 0  # of those, accepted
    time: float = 0.0  # when the tokens were collected


@dataclass(slots=True)
class TokenUpdates:
    """What a step has brought to each request that it brought anything.

    Most have new tokens, go on, and there is nothing else to say. They are columns and no objects, for a batch that
    decodes consists of them, step after step.
    """

    request_ids: Sequence[str] = ()
    token_ids: Sequence[list[int]] = ()
    num_drafts: Sequence[int] = ()  # empty where nothing is drafted
    num_accepted: Sequence[int] = ()
    others: dict[int, TokenUpdate] = field(default_factory=dict)  # with more to say, by place in the columns
    time: float = 0.0  # when the tokens were collected

    @classmethod
    def of(cls, updates: Sequence[TokenUpdate]) -> TokenUpdates:
        columns = ([u.request_id for u in updates], [u.token_ids for u in updates])
        drafts = ([u.num_drafts for u in updates], [u.num_accepted for u in updates])
        return cls(*columns, *drafts, dict(enumerate(updates)))

    def __len__(self) -> int:
        return len(self.request_ids)

    def __iter__(self) -> Iterator[TokenUpdate]:
        return map(self.at, range(len(self)))

    def at(self, place: int) -> TokenUpdate:
        """One of them as an object."""
        if (update := self.others.get(place)) is not None:
            return update
        update = TokenUpdate(self.request_ids[place], self.token_ids[place], time=self.time)
        if self.num_drafts:
            update.num_drafts, update.num_accepted = self.num_drafts[place], self.num_accepted[place]
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
        """Requests that got their last tokens."""
        return [update.request_id for update in self.others.values() if update.finish_reason is not None]
