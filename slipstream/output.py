"""Outputs for callers: a request's completions with text, statistics and finish reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.pooling import PooledVector

FinishReason = Literal["stop", "length", "abort", "error"]


class LogprobRow(NamedTuple):
    """Log probabilities at one position: the token in the text first, then the most likely ones in order."""

    rank: int  # of the token in the text; 1 is the most likely
    token_ids: list[int]
    values: list[float]


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
    """Verified and accepted drafts by draft position, of one request or of several together."""

    num_steps: int = 0  # verifications, one per request and step
    num_drafts_at: list[int] = field(default_factory=list)
    num_accepted_at: list[int] = field(default_factory=list)
    # Acceptance was forced at given rates, for a benchmark: the text is meaningless.
    is_synthetic: bool = False

    def add_all(self, verifications: Iterable[tuple[int, int]]) -> None:
        """Count verifications given as (drafts, accepted). Equal ones, which are frequent, are counted together."""
        for (num_drafts, num_accepted), times in Counter(verifications).items():
            self.add(num_drafts, num_accepted, times)

    def add(self, num_drafts: int, num_accepted: int, times: int = 1) -> None:
        self.num_steps += times
        missing = num_drafts - len(self.num_drafts_at)  # a negative number adds nothing
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
        """Mean tokens per verification: the accepted drafts and the target's own token."""
        return 1.0 + self.num_accepted / self.num_steps if self.num_steps else 1.0

    @property
    def acceptance_at(self) -> list[float]:
        """Acceptance rate by draft position."""
        return [accepted / drafts for accepted, drafts in zip(self.num_accepted_at, self.num_drafts_at, strict=True)]

    def copy(self) -> DraftStats:
        return replace(self, num_drafts_at=self.num_drafts_at[:], num_accepted_at=self.num_accepted_at[:])

    def as_dict(self) -> dict[str, Any]:
        """The form for results in JSON."""
        found: dict[str, Any] = {
            "drafts": self.num_drafts,
            "accepted": self.num_accepted,
            "mean_length": round(self.mean_length, 4),
            "acceptance_by_position": [round(rate, 4) for rate in self.acceptance_at],
        }
        return found | ({"synthetic": SYNTHETIC_NOTICE} if self.is_synthetic else {})


SYNTHETIC_NOTICE = "acceptance is forced at given rates for a benchmark; the text is meaningless"
# For headers, logs and metrics, where the subject is not evident.
SYNTHETIC_WARNING = f"synthetic acceptance: {SYNTHETIC_NOTICE}"


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log probability of one token at one position, before any sampling parameter."""

    logprob: float
    rank: int
    text: str


Logprobs = dict[int, Logprob]  # by token id


@dataclass(slots=True)
class Completion:
    """One choice of a request."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[Logprobs] | None = None  # one for each token, if requested
    speculation: DraftStats | None = None  # if the engine speculates
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
    warning: str | None = None  # if it was served otherwise than asked, such as with fewer tokens

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


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """How well two texts fit."""

    score: float
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class RerankOutput:
    """A document in its place after reranking."""

    index: int  # among the documents as they were given
    score: float
    document: str


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """The probabilities of a text's labels."""

    label: str  # the most likely one
    probs: npt.NDArray[np.floating]
    labels: tuple[str, ...]
    num_prompt_tokens: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """One text's vector."""

    request_id: str
    embedding: npt.NDArray[np.floating]  # float32, of a model in float64 float64; empty where there is an error
    num_prompt_tokens: int
    num_cached_tokens: int = 0  # of those, found in the prefix cache
    total_s: float = 0.0  # from the request's arrival to its vector
    error: str | None = None
