"""The engine as its callers use it: prompts in, outputs to a sink, from any thread."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from slipstream.engine.build import Engine
from slipstream.engine.driver import Deliver
from slipstream.engine.loop import EngineLoop, RunningEngine
from slipstream.engine.output_processor import OutputProcessor, Sink
from slipstream.engine.stats import EngineStats
from slipstream.errors import EngineError, RequestError
from slipstream.models.tokenizer import Tokenizer
from slipstream.scheduler.pages import check_fits
from slipstream.types import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_DEVICE_STOP_IDS,
    MAX_SEED,
    Request,
    SamplingParams,
    TokenUpdates,
)

Prompt = str | Sequence[int]


class _NoText:
    """Stands in for a tokenizer where there is none: a bare shape has tokens but no text."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class Submission:
    """A prompt that was checked and resolved: one request for each continuation."""

    request_id: str
    prompt: str | None
    requests: tuple[Request, ...]


class EngineClient:
    """``start`` brings an engine to life, in a thread or in a process, and is given what takes its tokens."""

    def __init__(self, start: Callable[[Deliver], RunningEngine]) -> None:
        self.running = start(lambda updates: self._output.deliver(updates))
        self._engine = self.running.info
        self.config = self._engine.config
        self._ids = itertools.count()
        self._seeds = random.Random(self.config.seed)
        self._lock = threading.Lock()
        self._closed = False
        decoder = self._engine.tokenizer or _NoText()
        self._output = OutputProcessor(decoder, self.running.finish, self.config.speculative)

    @classmethod
    def in_thread(cls, build: Callable[[], Engine]) -> EngineClient:
        """``build`` is called in the engine's own thread; its errors come out here."""
        return cls(lambda deliver: EngineLoop(build, deliver))

    @property
    def tokenizer(self) -> Tokenizer:
        if self._engine.tokenizer is None:
            raise RequestError("this engine runs a bare shape and has no tokenizer; pass token ids")
        return self._engine.tokenizer

    @property
    def stats(self) -> EngineStats:
        return self.running.stats

    def prepare(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None = None, priority: int = 0
    ) -> Submission:
        """Check a prompt and resolve everything the engine needs; raises RequestError before anything runs."""
        token_ids = tuple(self.tokenizer.encode(prompt)) if isinstance(prompt, str) else tuple(prompt)
        self._check_tokens(token_ids, params)
        params = params.with_defaults(self._engine.defaults)
        with self._lock:
            request_id = request_id or f"request-{next(self._ids)}"
            if params.seed is None:
                params = replace(params, seed=self._seeds.randint(0, MAX_SEED))
        end_ids = () if params.ignore_eos else self._engine.eos_token_ids
        stop_token_ids = tuple(dict.fromkeys((*end_ids, *params.stop_token_ids)))
        if params.min_tokens and len(stop_token_ids) > MAX_DEVICE_STOP_IDS:
            raise RequestError(f"min_tokens works with at most {MAX_DEVICE_STOP_IDS} stop token ids; give fewer")
        first = Request(
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=params,
            stop_token_ids=stop_token_ids,
            max_total_tokens=self._max_total_tokens(len(token_ids), params.max_tokens),
            arrival_time=time.monotonic(),
            priority=priority,
            bad_word_ids=self._bad_word_ids(params.bad_words),
        )
        check_fits(first, self.config.cache)
        others = (replace(first, request_id=f"{request_id}#{i}", choice=i) for i in range(1, params.n))
        return Submission(request_id, prompt if isinstance(prompt, str) else None, (first, *others))

    def _check_tokens(self, token_ids: tuple[int, ...], params: SamplingParams) -> None:
        limit, vocab_size = self.config.scheduler.max_model_len, self.config.model.vocab_size
        if not token_ids:
            raise RequestError("the prompt is empty; give at least one token")
        if len(token_ids) >= limit:
            raise RequestError(f"the prompt has {len(token_ids)} tokens, the context holds {limit}; shorten the prompt")
        for name, ids in (
            ("prompt", token_ids),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", tuple(params.logit_bias or ())),
        ):
            if bad := [t for t in ids if not isinstance(t, int) or not 0 <= t < vocab_size]:
                raise RequestError(f"{name} holds {bad[0]!r}, which is not a token id below {vocab_size}")

    def _bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as it is spelled at the start of a text and after a space, which tokenizers tell apart."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word, " " + word.lstrip()):
                token_ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))
                if len(token_ids) > MAX_BAD_WORD_TOKENS:
                    raise RequestError(
                        f"bad word '{word}' has {len(token_ids)} tokens; at most {MAX_BAD_WORD_TOKENS} are supported"
                    )
                found[token_ids] = None
        if len(found) > MAX_BAD_WORDS:
            raise RequestError(
                f"bad_words has {len(found)} spellings, counted with and without a space before; "
                f"at most {MAX_BAD_WORDS} are supported"
            )
        return tuple(found)

    def _max_total_tokens(self, prompt_len: int, max_tokens: int | None) -> int:
        limit = self.config.scheduler.max_model_len
        if max_tokens is None:
            # Nothing was promised, so take what the cache can hold, but room for one token at least.
            return max(prompt_len + 1, min(limit, self.config.cache.num_usable_tokens))
        return min(prompt_len + max_tokens, limit)

    def submit(self, submission: Submission, sink: Sink, *, every_token: bool = True) -> None:
        """Start a request. ``sink`` is called from the output thread, at the end or for every new piece of text."""
        if self._closed:
            raise EngineError("the engine is closed")
        self._output.register(submission.request_id, submission.requests, submission.prompt, sink, every_token)
        try:
            for request in submission.requests:
                self.running.add(request)
        except EngineError:
            self._output.forget(submission.request_id)
            raise

    @contextmanager
    def tapped(self, listener: Callable[[TokenUpdates], None]) -> Iterator[None]:
        """Let a benchmark see every token after it was collected, whoever it is for."""
        self._output.taps.append(listener)
        try:
            yield
        finally:
            self._output.taps.remove(listener)

    def abort(self, request_id: str) -> None:
        self._output.abort(request_id)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.running.close()
            self._output.close()
