"""For callers of the library: complete outputs, given to a sink from a thread that delays no step."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from slipstream.engine.admission import Submission
from slipstream.engine.lowered_limits import warn_of_lowered_limits
from slipstream.engine.output_processor import OutputProcessor
from slipstream.engine.text_stream import TextStream
from slipstream.output import Completion, EmbeddingOutput, RequestOutput, RequestTimings, TokenUpdates

Sink = Callable[[RequestOutput], None]
EmbeddingSink = Callable[[EmbeddingOutput], None]
_NOT_NUMBERS = "the model produced hidden states that are not numbers for this text; its vector was discarded"


class OutputReader:
    """One prompt and all its choices as a ``RequestOutput``, for every update or at the end."""

    def __init__(self, submission: Submission, sink: Sink, every_token: bool) -> None:
        self.every_token = every_token
        self._submission = submission
        self._sink = sink
        self._streams: list[TextStream] = []
        self._timings = RequestTimings()
        self._prompt_token_ids = list(submission.requests[0].prompt_token_ids)  # one list shared by all outputs
        self._num_finished = 0

    def begin(self, streams: list[TextStream]) -> None:
        """Called before the first update of any stream."""
        self._streams = streams

    def take(self, stream: TextStream) -> None:
        self._num_finished += stream.is_finished
        first = self._submission.requests[0]
        if self._timings.first_token_s is None and stream.first_token_time is not None:
            self._timings.first_token_s = stream.first_token_time - first.arrival_time
        if self.every_token or self._num_finished == len(self._streams):
            self._deliver()

    def _deliver(self) -> None:
        first, streams = self._submission.requests[0], self._streams
        self._timings.total_s = time.monotonic() - first.arrival_time
        self._sink(
            RequestOutput(
                request_id=self._submission.request_id,
                prompt=self._submission.prompt,
                prompt_token_ids=self._prompt_token_ids,
                outputs=[_copy(stream) for stream in streams],
                seed=first.params.seed or 0,
                timings=replace(self._timings),
                finished=self._num_finished == len(self._streams),
                error=next((stream.error for stream in streams if stream.error), None),
                num_cached_tokens=max(stream.num_cached_tokens for stream in streams),
                prompt_logprobs=next((s.prompt_logprobs for s in streams if s.prompt_logprobs), None),
                warning=warn_of_lowered_limits(first),
            )
        )


class EmbeddingReader:
    """One text's vector as an ``EmbeddingOutput``, finished here: shortened and normalised."""

    every_token = False

    def __init__(self, submission: Submission, sink: EmbeddingSink) -> None:
        self._submission = submission
        self._sink = sink

    def take(self, stream: TextStream) -> None:
        (request,) = self._submission.requests
        assert request.pooling is not None
        found, error, embedding = stream.vector, stream.error, np.zeros(0, dtype=np.float32)
        if error is None and found is not None and not found.is_finite:
            error = _NOT_NUMBERS
        elif error is None and found is not None:
            embedding = found.finish(request.pooling)
        elif error is None:
            error = "the request was aborted"
        self._sink(
            EmbeddingOutput(
                request_id=self._submission.request_id,
                embedding=embedding,
                num_prompt_tokens=len(request.prompt_token_ids),
                num_cached_tokens=stream.num_cached_tokens,
                total_s=time.monotonic() - request.arrival_time,
                error=error,
            )
        )


def _copy(stream: TextStream) -> Completion:
    """The stream as it is now; it continues while the caller reads the copy."""
    stream.count_drafts()
    c = stream.completion
    logprobs = None if c.logprobs is None else c.logprobs[:]
    drafts = None if c.speculation is None else c.speculation.copy()
    copy = Completion(c.index, c.text, c.token_ids[:], c.finish_reason, c.stop_reason, logprobs, drafts, c.delta_text)
    c.delta_text = ""
    return copy


class OutputThread:
    """Processes updates in its own thread."""

    def __init__(self, processor: OutputProcessor) -> None:
        self._processor = processor
        self._inbox: queue.SimpleQueue[TokenUpdates | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="slipstream-output", daemon=True)
        self._thread.start()

    def deliver(self, updates: TokenUpdates) -> None:
        self._inbox.put(updates)

    def close(self) -> None:
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (updates := self._inbox.get()) is not None:
            self._processor.process(updates)
