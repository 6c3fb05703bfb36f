"""The nouns of the domain as plain data: requests and their parameters, step plans, results.

Nothing here imports torch or knows how a step is run.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.errors import RequestError, nearest
from slipstream.values import MAX_INT32, Bounds, describe_value, is_valid_text, read_number, read_sequence

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
# Texts and ids that are compared with every token of a request.
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 4096


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

    def __new__(cls, *_given: object, **values: object) -> SamplingParams:
        """A name that does not exist is refused with the nearest one that does."""
        for name in values:
            if name not in _PARAM_NAMES:
                raise RequestError(f"unknown sampling parameter '{name}'{nearest(name, _PARAM_NAMES)}")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        """Check every field, and keep plain values only: what is accepted here can travel to another process."""

        def keep(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        for name, bounds in _NUMBERS.items():
            keep(name, read_number(name, getattr(self, name), bounds))
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, not {describe_value(getattr(self, name))}")
        keep("stop", _read_texts("stop", self.stop, MAX_STOP_STRINGS, MAX_STOP_LENGTH))
        keep("bad_words", _read_texts("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_STOP_LENGTH))
        keep("stop_token_ids", _read_stop_ids(self.stop_token_ids))
        if self.logit_bias is not None:
            keep("logit_bias", _read_bias(self.logit_bias))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}; lower it")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SamplingParams:
        return cls(**values)

    def with_defaults(self, defaults: SamplingParams) -> SamplingParams:
        """Fill what the user left open from the model's defaults, then from the engine's."""

        def pick(name: str, fallback: float) -> Any:
            for source in (self, defaults):
                if (value := getattr(source, name)) is not None:
                    return value
            return fallback

        return self._copy(
            temperature=float(pick("temperature", 1.0)),
            top_k=max(0, int(pick("top_k", 0))),
            top_p=float(pick("top_p", 1.0)),
            min_p=float(pick("min_p", 0.0)),
            repetition_penalty=float(pick("repetition_penalty", 1.0)),
        )

    def with_seed(self, seed: int) -> SamplingParams:
        return self._copy(seed=seed)

    def _copy(self, **changes: Any) -> SamplingParams:
        """Another one with some values that are known to be good: nothing is checked again."""
        copy = object.__new__(SamplingParams)
        for name in _PARAM_NAMES:
            object.__setattr__(copy, name, changes[name] if name in changes else getattr(self, name))
        return copy


_PARAM_NAMES = tuple(f.name for f in fields(SamplingParams))


_NUMBERS = {
    "temperature": Bounds(0.0, 100.0),
    "top_p": Bounds(0.0, 1.0, is_low_open=True),
    "min_p": Bounds(0.0, 1.0),
    "presence_penalty": Bounds(-2.0, 2.0, may_be_none=False),
    "frequency_penalty": Bounds(-2.0, 2.0, may_be_none=False),
    "repetition_penalty": Bounds(0.0, 100.0, is_low_open=True),
    "top_k": Bounds(-1, math.inf, is_integer=True),
    "min_tokens": Bounds(0, math.inf, is_integer=True, may_be_none=False),
    "max_tokens": Bounds(1, math.inf, is_integer=True),
    "n": Bounds(1, 128, is_integer=True, may_be_none=False),
    "seed": Bounds(0, MAX_SEED, is_integer=True),
    "logprobs": Bounds(0, MAX_LOGPROBS, is_integer=True),
    "prompt_logprobs": Bounds(0, MAX_LOGPROBS, is_integer=True),
    "max_k": Bounds(0, math.inf, is_integer=True),
}
_SWITCHES = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "speculate")
_TOKEN_ID = Bounds(0, MAX_INT32, is_integer=True, may_be_none=False)
_BIAS = Bounds(-100.0, 100.0, may_be_none=False)


def _read_texts(name: str, value: Any, limit: int, max_length: int) -> tuple[str, ...]:
    """One text or several."""
    texts = (value,) if isinstance(value, str) else read_sequence(name, value or (), "texts", limit)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise RequestError(f"{name} must be non-empty strings")
        if len(text) > max_length:
            raise RequestError(f"{name} holds a text of {len(text)} characters; at most {max_length} are supported")
        if not is_valid_text(text):
            raise RequestError(f"{name} must be texts of valid Unicode characters")
    return tuple(map(str, texts))


def _read_stop_ids(value: Any) -> tuple[int, ...]:
    given = () if value is None else read_sequence("stop_token_ids", value, "token ids", MAX_STOP_TOKEN_IDS)
    return tuple(read_number("stop_token_ids", token_id, _TOKEN_ID) for token_id in given)


def _read_bias(given: Any) -> dict[int, float]:
    """Token ids as JSON has them, in strings, become numbers; everything is checked."""
    if not isinstance(given, Mapping):
        raise RequestError("logit_bias must map token ids to numbers")
    if len(given) > MAX_LOGIT_BIAS:
        raise RequestError(f"logit_bias has {len(given)} entries; at most {MAX_LOGIT_BIAS} are supported")
    bias = {}
    for token_id, value in given.items():
        number: Any = token_id
        if isinstance(token_id, str):
            # Longer ones are no id, and Python refuses to read the longest.
            number = int(token_id) if token_id.isascii() and token_id.isdigit() and len(token_id) <= 10 else None
            if number is None:
                raise RequestError(f"logit_bias holds {describe_value(token_id)}, which is not a token id")
        bias[read_number("token ids in logit_bias", number, _TOKEN_ID)] = read_number(
            "values in logit_bias", value, _BIAS
        )
    return bias


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
