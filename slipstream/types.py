"""The nouns of the domain as plain data: requests and their parameters, step plans, results.

Nothing here imports torch or knows how a step is run.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

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


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose a request's tokens. ``None`` means: what the model's generation config says, else the default."""

    temperature: float | None = None  # default 1.0; 0 is greedy
    top_k: int | None = None  # default 0: off
    top_p: float | None = None  # default 1.0: off
    seed: int | None = None  # default: drawn at random, and reported in the output
    max_tokens: int | None = None  # default: up to the context limit
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        # Users pass lists and single strings; frozen data wants tuples.
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        self._check()

    def _check(self) -> None:
        _check_number("temperature", self.temperature, low=0.0, high=100.0)
        _check_number("top_p", self.top_p, low=0.0, high=1.0, low_open=True)
        _check_integer("top_k", self.top_k, low=-1)
        _check_integer("max_tokens", self.max_tokens, low=1)
        _check_integer("seed", self.seed, low=0, high=MAX_SEED)
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise RequestError("stop must be non-empty strings")
        for token_id in self.stop_token_ids:
            _check_integer("stop_token_ids", token_id, low=0)

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
        )


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


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's share of a step."""

    request_id: str
    generation: int  # how often the request was admitted; an output of an older generation is dropped
    row: int
    num_tokens: int  # query tokens in this step
    num_computed_bound: int  # computed length before this step, never below the device's
    samples: bool  # whether the step reaches the end of the request's tokens and so draws a new one


@dataclass(frozen=True, slots=True)
class RowInit:
    """Everything a row needs when a request moves in."""

    row: int
    token_ids: Sequence[int]
    num_computed: int
    max_total_tokens: int
    params: SamplingParams
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PageDiff:
    """Pages appended to a row's page table."""

    row: int
    first_idx: int
    page_ids: Sequence[int]


@dataclass(slots=True)
class StepPlan:
    """One step, decided: which rows run how many tokens, and what changes on the device before."""

    step_id: int
    requests: list[ScheduledRequest]
    row_inits: list[RowInit] = field(default_factory=list)
    page_diffs: list[PageDiff] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(r.num_tokens for r in self.requests)


@dataclass(slots=True)
class StepResult:
    """What a finished step produced, in the order of its plan."""

    plan: StepPlan
    token_ids: list[list[int]]
    statuses: list[RowStatus]


@dataclass(slots=True)
class TokenUpdate:
    """New tokens of one request, as the engine loop hands them on. No text yet: detokenising is off the loop."""

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token or stop string that ended it
    error: str | None = None
    time: float = 0.0  # when the tokens were collected


@dataclass(slots=True)
class RequestTimings:
    """Seconds, measured from the request's arrival."""

    first_token_s: float | None = None
    total_s: float = 0.0

    def tokens_per_s(self, num_tokens: int) -> float:
        """Output rate of the decode part: the first token belongs to prefill."""
        if self.first_token_s is None or num_tokens < 2:
            return 0.0
        return (num_tokens - 1) / max(self.total_s - self.first_token_s, 1e-9)


@dataclass(slots=True)
class Completion:
    """One generated continuation of a prompt."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


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
    delta_text: str = ""

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[0].finish_reason
