"""Transcribing over HTTP: a form with a sound file in, a transcript out, in one piece or as its windows are done."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from slipstream.engine.client import EngineClient
from slipstream.errors import SlipstreamError
from slipstream.server.answer_writer import as_error_event
from slipstream.server.errors import ApiError, as_api_error
from slipstream.server.generation import Gate, shutting_down
from slipstream.server.http.exchange import Exchange
from slipstream.server.http.multipart import FormLimits, parse_form
from slipstream.server.metrics import ServerMetrics
from slipstream.server.routes import ModelName
from slipstream.server.speech_form import ROUTES, SpeechForm, read_speech_form
from slipstream.transcription.engine_model import open_speech_model
from slipstream.transcription.result import Segment, Transcription
from slipstream.transcription.transcriber import prepare_sound, transcribe_sound
from slipstream.transcription.writers import WRITERS, describe_usage, dump_json, write_verbose_json

logger = logging.getLogger("slipstream.server")

_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
_JSON, _TEXT = b"application/json", b"text/plain; charset=utf-8"
_NUM_DECODERS = 2  # threads that decode sounds and compute features


@dataclass(frozen=True)
class SpeechContext:
    client: EngineClient
    gate: Gate
    metrics: ServerMetrics
    model: ModelName
    limits: FormLimits


class SpeechRoutes:
    def __init__(self, context: SpeechContext) -> None:
        self._context = context
        self._tasks: set[asyncio.Task[None]] = set()
        self._decoding = ThreadPoolExecutor(_NUM_DECODERS, "slipstream-sound")

    def handle(self, exchange: Exchange) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(exchange))
        self._tasks.add(task)  # the event loop holds only weak references to tasks
        task.add_done_callback(self._tasks.discard)

        def leave() -> None:
            task.cancel()

        exchange.on_gone = leave

    def end_all(self) -> None:
        """The shutdown's time limit has passed: every answer under way ends with an error."""
        for task in self._tasks:
            task.cancel()
        self._decoding.shutdown(wait=False, cancel_futures=True)

    async def _answer(self, exchange: Exchange) -> None:
        try:
            await self._transcribe(exchange)
        except asyncio.CancelledError:
            _fail(exchange, shutting_down())  # where the client is gone, nothing is sent
        except Exception as error:
            if not isinstance(error, ApiError | SlipstreamError):
                logger.exception("a request failed: POST %s", exchange.request.path)
            refusal = as_api_error(error)
            if refusal.status == 429:
                self._context.metrics.refuse()
            _fail(exchange, refusal)

    async def _transcribe(self, exchange: Exchange) -> None:
        context, request = self._context, exchange.request
        speech = open_speech_model(context.client)
        context.gate.check_room(1)

        def read() -> SpeechForm:
            parts = parse_form(request.header(b"content-type"), request.body, context.limits)
            return read_speech_form(parts, ROUTES[request.path])

        loop = asyncio.get_running_loop()
        form = await loop.run_in_executor(self._decoding, read)
        exchange.drop_body()
        context.model.check(form.model)
        context.gate.enter(1)
        try:
            sound = await loop.run_in_executor(
                self._decoding, prepare_sound, form.content, form.file_name, speech, form.options.batched
            )
            answer = _Answer(exchange, form)
            result = await transcribe_sound(speech, sound, form.options, answer.tell)
        except BaseException:
            context.gate.abort(1)
            raise
        context.gate.leave(1)
        context.metrics.end("stop")
        context.metrics.request_time.observe(time.monotonic() - request.arrival_time)
        answer.finish(result)


class _Answer:
    def __init__(self, exchange: Exchange, form: SpeechForm) -> None:
        self._exchange = exchange
        self._form = form
        self._has_text = False

    def tell(self, segments: Sequence[Segment], _share: float) -> None:
        """New segments, as an event where a stream was asked for."""
        text = "".join(segment.text for segment in segments)
        if not self._form.is_streamed or not text.strip():
            return
        self._open()
        delta = text if self._has_text else text.lstrip()
        self._has_text = True
        self._exchange.write(_event({"type": "transcript.text.delta", "delta": delta}))

    def finish(self, result: Transcription) -> None:
        form = self._form
        if form.is_streamed:
            self._open()
            done = {"type": "transcript.text.done", "text": result.text, "usage": describe_usage(result)}
            self._exchange.end(_event(done))
        elif form.response_format == "text":
            self._exchange.respond(200, f"{result.text}\n".encode(), _TEXT)
        elif form.response_format == "verbose_json":
            self._exchange.respond(200, write_verbose_json(result, form.has_segments).encode(), _JSON)
        else:
            kind = _JSON if "json" in form.response_format else _TEXT
            self._exchange.respond(200, WRITERS[form.response_format](result).encode(), kind)

    def _open(self) -> None:
        if self._exchange.status is None:
            self._exchange.start(200, _EVENTS)


def _event(content: object) -> bytes:
    return b"data: %b\n\n" % dump_json(content).encode()


def _fail(exchange: Exchange, refusal: ApiError) -> None:
    if not exchange.is_open:
        return
    if exchange.status is None:
        exchange.respond_json(refusal.status, refusal.body, refusal.headers)
    else:
        exchange.end(as_error_event(refusal))
