"""Runs of ``spec_bench.py``: so many requests at a time, and what every step brought to each of them."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from slipstream.engine.client import EngineClient
from slipstream.errors import EngineError
from slipstream.output import RequestOutput, TokenUpdates
from slipstream.sampling_params import SamplingParams


class Answer(NamedTuple):
    prompt: list[int]
    token_ids: list[int]
    text: str
    seed: int


class Seen(NamedTuple):
    """What a step brought to each of its requests."""

    request_ids: Sequence[str]
    num_tokens: Sequence[int]
    num_drafts: Sequence[int]  # that were checked; empty where nothing is drafted


@dataclass(frozen=True)
class Steps:
    """Of requests, each counted for itself. The step that ends a prompt brings a token and is not among them."""

    num_steps: int = 0
    num_tokens: int = 0
    num_checks: int = 0  # steps with drafts
    num_checked_tokens: int = 0  # that those brought

    @classmethod
    def from_updates(cls, seen: Iterable[Seen]) -> Steps:
        begun: set[str] = set()
        num_steps = num_tokens = num_checks = num_checked_tokens = 0
        for step in seen:
            drafts = step.num_drafts or [0] * len(step.request_ids)
            for request_id, count, num_drafts in zip(step.request_ids, step.num_tokens, drafts, strict=True):
                if count and request_id in begun:
                    num_steps, num_tokens = num_steps + 1, num_tokens + count
                    if num_drafts:
                        num_checks, num_checked_tokens = num_checks + 1, num_checked_tokens + count
                elif count:
                    begun.add(request_id)
        return cls(num_steps, num_tokens, num_checks, num_checked_tokens)

    def __add__(self, other: Steps) -> Steps:
        return Steps(
            self.num_steps + other.num_steps,
            self.num_tokens + other.num_tokens,
            self.num_checks + other.num_checks,
            self.num_checked_tokens + other.num_checked_tokens,
        )

    @property
    def accepted_length(self) -> float:
        """Tokens a check; 1, the target's own, where nothing was checked."""
        return self.num_checked_tokens / self.num_checks if self.num_checks else 1.0

    @property
    def tokens_a_step(self) -> float:
        return self.num_tokens / self.num_steps if self.num_steps else 1.0


@dataclass(frozen=True)
class Run:
    """One method over one kind of questions."""

    answers: list[Answer]
    seconds: float
    steps: Steps
    busy_s: float = 0.0  # of the seconds, those in which the engine had steps under way

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def rate(self) -> float:
        return self.num_tokens / self.seconds


def joined(runs: Iterable[Run]) -> Run:
    runs = list(runs)
    answers = [answer for run in runs for answer in run.answers]
    seconds, busy_s = (sum(getattr(run, name) for run in runs) for name in ("seconds", "busy_s"))
    return Run(answers, seconds, sum((run.steps for run in runs), Steps()), busy_s)


def answers_to(
    client: EngineClient, prompts: Sequence[list[int]], params: Sequence[SamplingParams], batch: int | None = None
) -> list[RequestOutput]:
    """To all, in order. With a batch, so many run at a time: the next is sent when one is done."""
    requests = [client.prepare(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    outputs: dict[str, RequestOutput] = {}
    done: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
    num_sent = 0
    while len(outputs) < len(requests):
        while num_sent < min(len(requests), len(outputs) + (batch or len(requests))):
            client.submit(requests[num_sent], done.put, every_token=False)
            num_sent += 1
        output = done.get()
        if output.error is not None:
            raise EngineError(output.error)
        outputs[output.request_id] = output
    return [outputs[request.request_id] for request in requests]


def generate(client: EngineClient, prompts: Sequence[list[int]], params: Sequence[SamplingParams], batch: int) -> Run:
    seen: list[Seen] = []

    def note(updates: TokenUpdates) -> None:
        seen.append(Seen(updates.request_ids, tuple(map(len, updates.token_ids)), updates.num_drafts))

    busy_s, start = client.stats.step_s.total, time.monotonic()
    with client.tapped(note):
        outputs = answers_to(client, prompts, params, batch)
    seconds, busy_s = time.monotonic() - start, client.stats.step_s.total - busy_s
    answers = [
        Answer(list(prompt), list(output.token_ids), output.text, one.seed or 0)
        for prompt, output, one in zip(prompts, outputs, params, strict=True)
    ]
    return Run(answers, seconds, Steps.from_updates(seen), busy_s)
