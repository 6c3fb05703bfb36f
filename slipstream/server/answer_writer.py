"""From the engine's text streams to a client's connection: all new text of a turn goes out as one event.

No task waits for a token. The writer is notified while the engine's updates are read, and writes once they are all
read. A client that reads too slowly gets everything that arrived meanwhile in one event.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass

from slipstream.engine.client import EngineClient
from slipstream.engine.text_stream import TextStream
from slipstream.errors import EngineError
from slipstream.server.answers import Answer
from slipstream.server.errors import ApiError, as_api_error
from slipstream.server.generation import Gate, Generation, shutting_down
from slipstream.server.http.exchange import Exchange
from slipstream.server.metrics import ServerMetrics

_EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
_JSON = b"application/json"


@dataclass(frozen=True)
class AnswerPlan:
    """A request that was checked and resolved, and how it will be answered."""

    generation: Generation
    answer: Answer
    is_streamed: bool
    include_usage: bool


@dataclass(frozen=True)
class WriterContext:
    """What all writers of a front end share."""

    client: EngineClient
    gate: Gate
    metrics: ServerMetrics
    has_drafts: bool
    schedule: Callable[[AnswerWriter], None]  # schedules a call of ``flush``
    add: Callable[[AnswerWriter], None]  # the answer has begun
    drop: Callable[[AnswerWriter], None]  # it is complete


@dataclass(slots=True, eq=False)
class _Choice:
    """One choice of the answer: its index, and what was last sent of it."""

    index: int
    num_told: int = 0
    told_at: float = 0.0


class AnswerWriter:
    """Reads all streams of one request. Created when the request starts, dropped when its answer is complete."""

    def __init__(self, context: WriterContext, exchange: Exchange, plan: AnswerPlan) -> None:
        self.every_token = plan.is_streamed
        self._context = context
        self._exchange = exchange
        self._plan = plan
        self._generation = plan.generation
        self._num_choices = plan.generation.num_continuations
        self._num_running = 0
        self._news: dict[TextStream, None] = {}
        self._is_scheduled = False
        self._is_over = False
        self._has_opened = False

    def start(self) -> None:
        """Give the prompts to the engine. Raises the error of the first prompt that is refused."""
        context, generation = self._context, self._generation
        context.gate.check_room(self._num_choices)
        context.gate.enter(self._num_choices)
        context.add(self)
        self._num_running = self._num_choices
        self._exchange.warnings += generation.warnings
        self._exchange.on_gone = self._abandon
        self._exchange.on_drained = self._schedule
        try:
            for submission in generation.submissions:
                context.client.start(submission, self, self._begin)
        except BaseException:
            self._end_streams()
            raise

    def _begin(self, streams: list[TextStream]) -> None:
        first = sum(map(len, self._generation.streams))
        for i, stream in enumerate(streams):
            stream.state = _Choice(first + i)
        self._generation.streams.append(streams)

    def take(self, stream: TextStream) -> None:
        self._news[stream] = None
        if not self._is_scheduled:
            self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled and not self._is_over and self._news:
            self._is_scheduled = True
            self._context.schedule(self)

    def flush(self) -> None:
        """Write what is new, unless the client has to catch up first."""
        self._is_scheduled = False
        if self._is_over or not self._exchange.keeps_up:
            return
        try:
            self._flush()
        except Exception as error:
            self.fail(error)

    def _flush(self) -> None:
        now = time.monotonic()
        news, self._news = self._news, {}
        parts: list[bytes] = []
        for stream in news:
            if stream.error is not None:
                self._write(parts)
                # "abort" with a reason means that the engine ended, not that the request was at fault.
                failed = stream.completion.finish_reason == "error"
                raise ApiError(500, stream.error) if failed else EngineError(stream.error)
            if stream.is_finished:
                stream.count_drafts()
                self._finish(stream)
                self._plan.answer.take_end(stream.state.index, stream)
            if self.every_token:
                self._tell(stream, now, parts)
        if self._num_running:
            self._write(parts)
            return
        for submission in self._generation.submissions:
            self._context.metrics.request_time.observe(now - submission.requests[0].arrival_time)
        self._complete(parts)

    def _tell(self, stream: TextStream, now: float, parts: list[bytes]) -> None:
        choice: _Choice = stream.state
        completion = stream.completion
        num_tokens = len(stream.token_ids)
        if num_new := num_tokens - choice.num_told:
            if choice.num_told:
                gap = (now - choice.told_at) / num_new
                self._context.metrics.time_between_tokens.observe(gap)
            choice.num_told, choice.told_at = num_tokens, now
        if event := self._plan.answer.event(choice.index, completion, completion.delta_text):
            parts.append(event)
        completion.delta_text = ""

    def _finish(self, stream: TextStream) -> None:
        self._num_running -= 1
        metrics = self._context.metrics
        metrics.end(stream.completion.finish_reason or "abort")
        self._context.gate.leave(1)
        if stream.first_token_time is not None and stream.request.choice == 0:
            metrics.time_to_first_token.observe(stream.first_token_time - stream.request.arrival_time)

    def _write(self, parts: list[bytes]) -> None:
        if parts:
            self._open(parts)
            self._exchange.write(b"".join(parts))

    def _open(self, parts: list[bytes]) -> None:
        """The first event decides the status: an error before it is an ordinary HTTP error."""
        if not self._has_opened:
            self._has_opened = True
            self._exchange.start(200, [_EVENTS, (b"cache-control", b"no-store")])
            parts.insert(0, self._plan.answer.opening(self._num_choices))

    def _complete(self, parts: list[bytes]) -> None:
        answer, generation = self._plan.answer, self._generation
        if self.every_token:
            parts.append(answer.closing(generation, self._plan.include_usage))
            self._open(parts)
        else:
            parts.append(answer.whole_bytes(generation, self._context.has_drafts))
        self._is_over = True  # only now: an error while the answer is built must still be sent
        self._context.drop(self)
        if self.every_token:
            self._exchange.end(b"".join(parts))
        else:
            self._exchange.respond(200, b"".join(parts), _JSON)

    def fail(self, error: Exception) -> None:
        """End the answer with an error, and the request with it."""
        if self._is_over:
            return
        self._end_streams()
        refusal, exchange = as_api_error(error), self._exchange
        if not self._has_opened:
            exchange.respond_json(refusal.status, refusal.body, refusal.headers)
            return
        exchange.note.status = refusal.status
        exchange.end(as_error_event(refusal))

    def end_server(self) -> None:
        """The shutdown's time limit has passed: end the answer with an error."""
        self.fail(shutting_down())

    def _abandon(self) -> None:
        """The client has disconnected."""
        self._end_streams()

    def _end_streams(self) -> None:
        """End the streams that still run, since their output has no reader any more."""
        if self._is_over:
            return
        self._is_over = True
        for submission in self._generation.submissions:
            self._context.client.forget(submission)
        if self._num_running:
            self._context.gate.abort(self._num_running)
            self._num_running = 0
        self._context.drop(self)


def as_error_event(error: ApiError) -> bytes:
    return b"data: %b\n\n" % json.dumps(error.body).encode()
