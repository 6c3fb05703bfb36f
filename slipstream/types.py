"""The nouns of the domain as plain data: requests and their parameters, step plans, results.

Nothing here imports torch or knows how a step is run.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.errors import RequestError, nearest

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_SEED = 2**64 - 1


class RowStatus(enum.IntEnum):
    """State of a request row on the device. Only RUNNING rows compute; any other value makes the row inert."""

    RUNNING = 0
    STOPPED = 1
    LENGTH = 2
    ERROR = 3
    INERT = 4


MAX_DEVICE_STOP_IDS = 16  # that the device checks by itself; the host checks the rest of a longer list
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
MAX_BAD_WORDS = 32
MAX_BAD_WORD_TOKENS = 8


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose a request's tokens. ``None`` means: what the model's generation config says, else the default."""

    temperature: float | None = None  # default 1.0; 0 is greedy
    top_k: int | None = None  # default 0: off
    top_p: float | None = None  # default 1.0: off
    min_p: float | None = None  # default 0.0: off
    presence_penalty: float = 0.0  # subtracted from tokens already in the output
    frequency_penalty: float = 0.0  # subtracted for each time a token is already in the output
    repetition_penalty: float | None = None  # default 1.0: off; divides tokens of prompt and output
    logit_bias: Mapping[int, float] | None = None  # token id -> added to its logit
    bad_words: tuple[str, ...] = ()  # never generated
    min_tokens: int = 0  # no end of sequence and no stop token before
    max_tokens: int | None = None  # default: up to the context limit
    n: int = 1  # how many continuations
    seed: int | None = None  # default: drawn at random, and reported in the output
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True  # in the text
    logprobs: int | None = None  # for each token its log probability, and those of this many of the likeliest
    prompt_logprobs: int | None = None  # the same for the prompt
    speculate: bool = True  # whether tokens may be drafted ahead for this request, where the engine drafts at all
    max_k: int | None = None  # most tokens drafted ahead for it; default: as many as the engine drafts

    def __post_init__(self) -> None:
        # Users pass lists and single strings; frozen data wants tuples.
        for name in ("stop", "bad_words"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _as_bias(self.logit_bias))
        self._check()

    def _check(self) -> None:
        _check_number("temperature", self.temperature, low=0.0, high=100.0)
        _check_number("top_p", self.top_p, low=0.0, high=1.0, low_open=True)
        _check_number("min_p", self.min_p, low=0.0, high=1.0)
        _check_number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _check_number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        _check_number("repetition_penalty", self.repetition_penalty, low=0.0, high=100.0, low_open=True)
        _check_integer("top_k", self.top_k, low=-1)
        _check_integer("min_tokens", self.min_tokens, low=0)
        _check_integer("max_tokens", self.max_tokens, low=1)
        _check_integer("n", self.n, low=1, high=128)
        _check_integer("seed", self.seed, low=0, high=MAX_SEED)
        _check_integer("logprobs", self.logprobs, low=0, high=MAX_LOGPROBS)
        _check_integer("prompt_logprobs", self.prompt_logprobs, low=0, high=MAX_LOGPROBS)
        _check_integer("max_k", self.max_k, low=0)
        if not isinstance(self.speculate, bool):
            raise RequestError(f"speculate must be true or false, not {self.speculate!r}")
        for name in ("stop", "bad_words"):
            if any(not isinstance(text, str) or not text for text in getattr(self, name)):
                raise RequestError(f"{name} must be non-empty strings")
        for token_id in self.stop_token_ids:
            _check_integer("stop_token_ids", token_id, low=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}; lower it")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SamplingParams:
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                raise RequestError(f"unknown sampling parameter '{name}'{nearest(name, known)}")
        return cls(**values)

    def with_defaults(self, defaults: SamplingParams) -> SamplingParams:
        """Fill what the user left open from the model's defaults, then from the engine's."""

        def pick(name: str, fallback: float) -> Any:
            for source in (self, defaults):
                if (value := getattr(source, name)) is not None:
                    return value
            return fallback

        return replace(
            self,
            temperature=float(pick("temperature", 1.0)),
            top_k=max(0, int(pick("top_k", 0))),
            top_p=float(pick("top_p", 1.0)),
            min_p=float(pick("min_p", 0.0)),
            repetition_penalty=float(pick("repetition_penalty", 1.0)),
        )


def _as_bias(given: Mapping[Any, Any]) -> dict[int, float]:
    """Token ids as JSON has them, in strings, become numbers; everything is checked."""
    if not isinstance(given, Mapping):
        raise RequestError("logit_bias must map token ids to numbers")
    if len(given) > MAX_LOGIT_BIAS:
        raise RequestError(f"logit_bias has {len(given)} entries; at most {MAX_LOGIT_BIAS} are supported")
    bias = {}
    for token_id, value in given.items():
        try:
            number = int(token_id)
        except (TypeError, ValueError):
            raise RequestError(f"logit_bias holds {token_id!r}, which is not a token id") from None
        _check_integer("token ids in logit_bias", number, low=0)
        _check_number("values in logit_bias", value, low=-100.0, high=100.0)
        bias[number] = float(value)
    return bias


def _check_number(
    name: str, value: Any, *, low: float, high: float = math.inf, low_open: bool = False, integer: bool = False
) -> None:
    if value is None:
        return
    right_kind = isinstance(value, int if integer else int | float) and not isinstance(value, bool)
    # Written so that NaN, which compares false with everything, is refused.
    if not (right_kind and (value > low if low_open else value >= low) and value <= high):
        kind = "an integer" if integer else "a number"
        bound = f"{'above' if low_open else 'of at least'} {_plain(low)}"
        bound += f" and at most {_plain(high)}" if high < math.inf else ""
        raise RequestError(f"{name} must be {kind} {bound}, not {value!r}")


def _plain(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _check_integer(name: str, value: Any, *, low: int, high: float = math.inf) -> None:
    _check_number(name, value, low=low, high=high, integer=True)


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the engine sees it: token ids in, limits resolved, nothing left to guess."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams  # with defaults filled in and a seed drawn
    stop_token_ids: tuple[int, ...]  # end-of-sequence ids included unless they are ignored
    max_total_tokens: int  # prompt and output together
    arrival_time: float = 0.0
    priority: int = 0  # lower runs first
    choice: int = 0  # which of a prompt's continuations this is; part of its noise
    bad_word_ids: tuple[tuple[int, ...], ...] = ()

    @property
    def may_use_cache(self) -> bool:
        """Whether cached keys and values may stand in for the prompt. Its logprobs need every position computed."""
        return self.params.prompt_logprobs is None

    def num_drafts(self, most: int) -> int:
        """How many tokens may be drafted ahead for it, of the most the engine drafts."""
        params = self.params
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


@dataclass(slots=True, eq=False)
class StepPlan:
    """One step, decided: which rows run how many tokens, and what changes on the device before."""

    step_id: int
    composition: Composition
    num_computed_bounds: npt.NDArray[np.int32]  # of each request, before the step
    row_inits: list[RowInit] = field(default_factory=list)
    page_diffs: list[PageDiff] = field(default_factory=list)

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


@dataclass(slots=True)
class RequestTimings:
    """Seconds, measured from the request's arrival."""

    first_token_s: float | None = None
    total_s: float = 0.0

    def tokens_per_s(self, num_tokens: int) -> float:
        """Output rate of the decode part: the first token belongs to prefill."""
        first = self.first_token_s
        return 0.0 if first is None or num_tokens < 2 else (num_tokens - 1) / max(self.total_s - first, 1e-9)


@dataclass(slots=True)
class DraftStats:
    """How drafts fared: counted by their place behind a known token."""

    num_steps: int = 0  # steps that checked drafts
    num_drafts_at: list[int] = field(default_factory=list)
    num_accepted_at: list[int] = field(default_factory=list)
    # Acceptance was forced at given rates, for a benchmark: the text means nothing.
    is_synthetic: bool = False

    def add(self, num_drafts: int, num_accepted: int, times: int = 1) -> None:
        self.num_steps += times
        missing = num_drafts - len(self.num_drafts_at)  # below 0 none
        self.num_drafts_at += [0] * missing
        self.num_accepted_at += [0] * missing
        for i in range(num_drafts):
            self.num_drafts_at[i] += times
        for i in range(num_accepted):
            self.num_accepted_at[i] += times

    @property
    def num_drafts(self) -> int:
        return sum(self.num_drafts_at)

    @property
    def num_accepted(self) -> int:
        return sum(self.num_accepted_at)

    @property
    def mean_length(self) -> float:
        """Tokens a checking step gives on average: the accepted drafts and the target's own."""
        return 1.0 + self.num_accepted / self.num_steps if self.num_steps else 1.0

    @property
    def acceptance_at(self) -> list[float]:
        """Of the drafts at each place, the share that was accepted."""
        return [taken / made for taken, made in zip(self.num_accepted_at, self.num_drafts_at, strict=True)]

    def copy(self) -> DraftStats:
        return replace(self, num_drafts_at=self.num_drafts_at[:], num_accepted_at=self.num_accepted_at[:])

    def as_dict(self) -> dict[str, Any]:
        """For people and programs that look at a result."""
        found: dict[str, Any] = {
            "drafts": self.num_drafts,
            "accepted": self.num_accepted,
            "mean_length": round(self.mean_length, 4),
            "acceptance_by_position": [round(rate, 4) for rate in self.acceptance_at],
        }
        return found | ({"synthetic": SYNTHETIC_NOTICE} if self.is_synthetic else {})


SYNTHETIC_NOTICE = "acceptance is forced at given rates for a benchmark; the text means nothing"
# For headers, logs and metrics, where nothing beside it says what it is about.
SYNTHETIC_WARNING = f"synthetic acceptance: {SYNTHETIC_NOTICE}"


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log probability of one token at one position, before any sampling parameter acted."""

    logprob: float
    rank: int
    text: str


Logprobs = dict[int, Logprob]  # by token id


@dataclass(slots=True)
class Completion:
    """One generated continuation of a prompt."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[Logprobs] | None = None  # one for each token, if asked for
    speculation: DraftStats | None = None  # where the engine drafts
    delta_text: str = ""  # what the latest update added


@dataclass(slots=True)
class RequestOutput:
    """A request's state as the caller sees it: all text and tokens so far, and what the latest update added."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    seed: int
    timings: RequestTimings
    finished: bool = False
    error: str | None = None
    num_cached_tokens: int = 0  # prompt tokens whose keys and values were found in the prefix cache
    prompt_logprobs: list[Logprobs | None] | None = None  # one for each prompt token; the first has none

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def delta_text(self) -> str:
        return self.outputs[0].delta_text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[0].finish_reason

    @property
    def speculation(self) -> DraftStats | None:
        return self.outputs[0].speculation
