"""The requests of ``lossless_fuzz.py``: every parameter drawn, and when each request comes and is aborted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lossless_fuzz_models import LETTERS, list_favoured_ids
from slipstream.sampling_params import MAX_SEED, SamplingParams
from tests.tiny_models import VOCAB_SIZE

MAX_TOTAL = 128  # tokens of a request, prompt and output
_MAX_PROMPT = 70
_BYTES = 256  # ids of plain bytes; special tokens follow
_NAMES = ("a", "b", "a#1", "c")  # ids of callers, used again and again


@dataclass(frozen=True)
class FuzzRequest:
    idx: int  # its number in the whole run
    prompt: str | tuple[int, ...]
    given: dict[str, Any]  # sampling parameters
    priority: int
    arrives_at: int  # the engine's step
    aborts_after: int | None  # steps after its arrival
    name: str | None  # the caller's id
    every_token: bool  # whether the caller reads every piece of text, or the end alone

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(**self.given)

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "prompt": self.prompt if isinstance(self.prompt, str) else list(self.prompt)}


def draw_requests(rng: random.Random, ids: range) -> list[FuzzRequest]:
    """Of one engine, in the order they arrive. Several prompts begin alike."""
    stems: list[list[int]] = [[], *(_draw_ids(rng, n) for n in (16, 33, 50))]
    arrivals = sorted(rng.randrange(2 * len(ids)) for _ in ids)
    return [_draw_request(rng, idx, at, stems) for idx, at in zip(ids, arrivals, strict=True)]


def _draw_request(rng: random.Random, idx: int, arrives_at: int, stems: Sequence[list[int]]) -> FuzzRequest:
    own = _draw_ids(rng, rng.choice([1, 3, 6, 15]))
    prompt: str | tuple[int, ...] = tuple((rng.choice(stems) + own * rng.choice([1, 1, 3]))[:_MAX_PROMPT])
    if rng.random() < 0.15:
        prompt = "".join(rng.choice(LETTERS) for _ in prompt)  # the tokenizer makes one token of each letter
    aborts_after = rng.choice([0, 1, 2, 4, 8, 16]) if rng.random() < 0.15 else None
    name = rng.choice(_NAMES) if rng.random() < 0.15 else None
    # Prompts as texts may get a token of the tokenizer's in front.
    given = draw_params(rng, MAX_TOTAL - len(prompt) - 1)
    priority = rng.choice([-1, 0, 0, 0, 0, 1])
    return FuzzRequest(idx, prompt, given, priority, arrives_at, aborts_after, name, rng.random() < 0.5)


def _draw_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.choice(list_favoured_ids()) if rng.random() < 0.8 else rng.randrange(VOCAB_SIZE) for _ in range(count)]


def draw_params(rng: random.Random, most_tokens: int) -> dict[str, Any]:
    """Those fields alone that are not left to their defaults."""
    max_tokens = min(most_tokens, rng.choice([1, 2, 7, 20, 40, 60, 60]))
    given: dict[str, Any] = {"max_tokens": max_tokens, "seed": rng.choice([0, MAX_SEED, rng.getrandbits(64)])}
    if rng.random() < 0.03:
        del given["max_tokens"]  # as many as there is room for
    if rng.random() < 0.1:
        del given["seed"]
    given |= _draw_distribution(rng) | _draw_history(rng) | _draw_end(rng, given.get("max_tokens", most_tokens))
    for name, chance, values in (
        ("n", 0.12, (2, 3)),
        ("logprobs", 0.5, (0, 1, 5, 20)),
        ("prompt_logprobs", 0.12, (0, 2, 20)),
        ("skip_special_tokens", 0.3, (False,)),
        ("speculate", 0.07, (False,)),
        ("max_k", 0.15, (0, 1, 2, 4)),
    ):
        if rng.random() < chance:
            given[name] = rng.choice(values)
    return given


def _draw_distribution(rng: random.Random) -> dict[str, Any]:
    drawn: dict[str, Any] = {}
    for name, chance, values in (
        ("temperature", 0.85, (0.0, 0.0, 0.0, 0.3, 0.7, 1.0, 1.6)),
        ("top_k", 0.3, (-1, 0, 1, 2, 6, 40)),
        ("top_p", 0.3, (0.1, 0.5, 0.9, 0.99)),
        ("min_p", 0.2, (0.02, 0.1, 0.6)),
    ):
        if rng.random() < chance:
            drawn[name] = rng.choice(values)
    if rng.random() < 0.25:
        # Some tokens all but forced, so that texts repeat themselves; others all but forbidden.
        biased = rng.sample(list_favoured_ids(), rng.choice([1, 4, 8]))
        drawn["logit_bias"] = {token_id: rng.choice([-100.0, -2.5, 3.0, 6.0, 30.0]) for token_id in biased}
    return drawn


def _draw_history(rng: random.Random) -> dict[str, Any]:
    drawn: dict[str, Any] = {}
    for name, chance, values in (
        ("repetition_penalty", 0.25, (0.8, 1.1, 1.5)),
        ("frequency_penalty", 0.2, (-0.4, 0.3, 1.2)),
        ("presence_penalty", 0.2, (-0.5, 0.6, 2.0)),
    ):
        if rng.random() < chance:
            drawn[name] = rng.choice(values)
    if rng.random() < 0.25:
        drawn["bad_words"] = tuple(_draw_word(rng) for _ in range(rng.choice([1, 3, 8])))
    return drawn


def _draw_end(rng: random.Random, max_tokens: int) -> dict[str, Any]:
    """What ends a request before its length does."""
    drawn: dict[str, Any] = {}
    if rng.random() < 0.7:
        drawn["ignore_eos"] = True
    if rng.random() < 0.3:
        drawn["stop_token_ids"] = tuple(rng.sample(list_favoured_ids(), rng.choice([1, 2, 4])))
    elif rng.random() < 0.1:  # more than the device checks
        drawn["stop_token_ids"] = tuple(rng.sample(range(_BYTES), 30))
    if rng.random() < 0.35:
        drawn["stop"] = tuple(_draw_word(rng) for _ in range(rng.choice([1, 3, 10])))
        drawn["include_stop_str_in_output"] = rng.random() < 0.3
    if len(drawn.get("stop_token_ids", ())) < 16 and rng.random() < 0.3:  # a long list is the host's
        drawn["min_tokens"] = rng.randint(1, max(1, max_tokens))
    return drawn


def _draw_word(rng: random.Random) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(rng.choice([1, 1, 2, 2, 3])))
