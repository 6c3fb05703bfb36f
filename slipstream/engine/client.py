"""The engine for its callers: prompts in, outputs to a sink, from any thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from slipstream.config import EngineConfig
from slipstream.engine.admission import Admission, Prompt, Submission
from slipstream.engine.build import Engine
from slipstream.engine.driver import Deliver
from slipstream.engine.loop import EngineLoop, RunningEngine
from slipstream.engine.output_processor import OutputProcessor, Reader
from slipstream.engine.pooled_prompt import TextOptions, TextPair
from slipstream.engine.reader import EmbeddingReader, EmbeddingSink, OutputReader, OutputThread, Sink
from slipstream.engine.stats import EngineStats
from slipstream.engine.text_stream import TextStream
from slipstream.errors import EngineError, RequestError
from slipstream.output import TokenUpdates
from slipstream.pooling import PoolingDefaults, PoolingParams
from slipstream.sampling_params import SamplingParams
from slipstream.text.tokenizer import Tokenizer

__all__ = ["EngineClient", "Prompt", "Submission"]


class _NoText:
    """Replaces the tokenizer of a model without one: a bare shape has tokens but no text."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return ""


class EngineClient:
    """``start`` starts an engine, in a thread or in a process, and takes the callback for its tokens.

    Outputs are detokenised in a thread, or ``in_line``: by the thread that reads the engine's updates.
    """

    def __init__(self, start: Callable[[Deliver], RunningEngine], *, in_line: bool = False) -> None:
        self.running = start(lambda updates: self._deliver(updates))
        self._admission = Admission(lambda: self.running.info, self.running.id_prefix)
        self._closed = False
        decoder = self.running.info.tokenizer or _NoText()
        self.output = OutputProcessor(decoder, self.running.finish, self.config.speculative)
        self._thread = None if in_line else OutputThread(self.output)
        self._deliver = self.output.process if self._thread is None else self._thread.deliver

    @classmethod
    def in_thread(cls, build: Callable[[], Engine]) -> EngineClient:
        """``build`` runs in the engine's own thread; its errors are raised here."""
        return cls(lambda deliver: EngineLoop(build, deliver))

    @property
    def config(self) -> EngineConfig:
        """Of the engine that runs now: one that was restarted may have found less memory."""
        return self.running.info.config

    @property
    def tokenizer(self) -> Tokenizer:
        if self.running.info.tokenizer is None:
            raise RequestError("this engine runs a bare shape and has no tokenizer; pass token ids")
        return self.running.info.tokenizer

    @property
    def pooling(self) -> PoolingDefaults:
        """How the checkpoint makes vectors and scores."""
        return self.running.info.pooling

    @property
    def stats(self) -> EngineStats:
        return self.running.stats

    def prepare(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None = None, priority: int = 0
    ) -> Submission:
        """Check a prompt and resolve everything the engine needs; raises RequestError before anything runs."""
        return self._admission.resolve(prompt, params, request_id, priority)

    def prepare_pooled(
        self,
        prompt: Prompt,
        pooling: PoolingParams,
        request_id: str | None = None,
        priority: int = 0,
        options: TextOptions | None = None,
    ) -> Submission:
        """The same for a text that is to become a vector."""
        return self._admission.resolve_pooled(prompt, pooling, request_id, priority, options)

    def prepare_scored(
        self,
        item: Prompt | TextPair,
        request_id: str | None = None,
        priority: int = 0,
        options: TextOptions | None = None,
    ) -> Submission:
        """The same for a text that is to be classified, or a pair that is to be scored."""
        return self._admission.resolve_scored(item, request_id, priority, options)

    def submit_pooled(self, submission: Submission, sink: EmbeddingSink) -> None:
        """Start it. ``sink`` is called from the output thread, once."""
        self.start(submission, EmbeddingReader(submission, sink), lambda _streams: None)

    def submit(self, submission: Submission, sink: Sink, *, every_token: bool = True) -> None:
        """Start a request. ``sink`` is called from the output thread, at the end or for every new piece of text."""
        reader = OutputReader(submission, sink, every_token)
        self.start(submission, reader, reader.begin)

    def start(self, submission: Submission, reader: Reader, begin: Callable[[list[TextStream]], None]) -> None:
        """Start a request for any kind of reader; ``begin`` receives its streams before their first update."""
        if self._closed:
            raise EngineError("the engine is closed")
        self._admission.check_again(submission)
        begin(self.output.register(submission, reader))
        try:
            for request in submission.requests:
                self.running.add(request)
        except BaseException:  # also KeyboardInterrupt: no part of the request may stay
            self.output.forget(submission)
            raise

    @contextmanager
    def tapped(self, listener: Callable[[TokenUpdates], None]) -> Iterator[None]:
        """Call a listener with every collected token of every request, for benchmarks."""
        self.output.taps.append(listener)
        try:
            yield
        finally:
            self.output.taps.remove(listener)

    def abort(self, request_id: str) -> None:
        """End a caller's request; its reader is notified of the end."""
        if (ends := self.output.abort(request_id)) is not None:
            self._deliver(ends)

    def forget(self, submission: Submission) -> None:
        """End a request without notifying its reader."""
        self.output.forget(submission)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.running.close()
            if self._thread is not None:
                self._thread.close()
