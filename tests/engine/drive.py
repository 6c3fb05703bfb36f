"""Running an engine core by hand, without threads: what comes out for each request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from slipstream.engine.core import EngineCore
from slipstream.output import FinishReason
from slipstream.request import Request
from slipstream.sampling_params import SamplingParams


@dataclass
class Outcome:
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None


def make_request(
    request_id: str,
    prompt: Iterable[int],
    max_tokens: int = 24,
    stop_token_ids: tuple[int, ...] = (),
    seed: int = 0,
    bad_word_ids: tuple[tuple[int, ...], ...] = (),
    **params: Any,
) -> Request:
    prompt = tuple(prompt)
    sampling = SamplingParams(**{"temperature": 0.0, "seed": seed, **params}).with_defaults(SamplingParams())
    return Request(request_id, prompt, sampling, stop_token_ids, len(prompt) + max_tokens, bad_word_ids=bad_word_ids)


def run(core: EngineCore, requests: Iterable[Request], max_steps: int = 10_000) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    for request in requests:
        core.add(request)
        outcomes[request.request_id] = Outcome()
    for _ in range(max_steps):
        if not core.has_work:
            return outcomes
        for update in core.step():
            outcome = outcomes[update.request_id]
            assert outcome.finish_reason is None, "an update after the end"
            outcome.token_ids += update.token_ids
            outcome.finish_reason, outcome.error = update.finish_reason, update.error
    raise AssertionError("the engine does not come to an end")
