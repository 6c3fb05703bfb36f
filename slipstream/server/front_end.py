"""One front end: an event loop that reads requests, passes them to the engine, and writes the responses.

The loop reads the engine's messages itself, and everything a turn produces for a client goes out in one write. A server
has one front end in its own process, or several in processes of their own (``run.py``).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from collections.abc import Callable

from slipstream.engine.client import EngineClient
from slipstream.engine.link import EngineLink
from slipstream.engine.loop import RunningEngine
from slipstream.output import SYNTHETIC_WARNING
from slipstream.server.access_log import AccessLog
from slipstream.server.admission_queue import AdmissionQueue
from slipstream.server.answer_writer import AnswerWriter, WriterContext
from slipstream.server.app import AppContext, create_app
from slipstream.server.counters import SharedCounters
from slipstream.server.generation import Gate
from slipstream.server.http.asgi import AsgiBridge
from slipstream.server.http.exchange import Exchange, HttpRequest
from slipstream.server.http.limits import ConnectionLimits, raise_descriptor_limit
from slipstream.server.http.listener import Listener
from slipstream.server.http.multipart import FormLimits
from slipstream.server.keys import check_key
from slipstream.server.metrics import ServerMetrics
from slipstream.server.pooled_routes import POOLED_ROUTES
from slipstream.server.routes import ROUTES, AnswerIds, ModelName, RouteContext, fingerprint_of
from slipstream.server.settings import ServerSettings
from slipstream.server.speech import SpeechContext, SpeechRoutes
from slipstream.server.speech_form import ROUTES as SPEECH_ROUTES

logger = logging.getLogger("slipstream.server")

_ROUTES = {**ROUTES, **POOLED_ROUTES}
_MESSAGES_A_TURN = 64
_FORM_BYTES = 1 << 20  # of a form, beside its file
_FLUSH_S = 1.0  # to send the error that ends an answer after the shutdown's time limit


class FrontEnd:
    """``counters`` are shared with the other front ends; ``number`` is this one's index."""

    def __init__(
        self,
        client: EngineClient,
        model_name: str,
        settings: ServerSettings,
        counters: SharedCounters | None = None,
        number: int = 0,
    ) -> None:
        self.client = client
        self.settings = settings
        running = client.running
        speculative = client.config.speculative
        is_synthetic = speculative is not None and speculative.is_synthetic
        self.model = ModelName(settings.served_model_name or model_name)
        self.metrics = ServerMetrics(
            lambda: client.stats, lambda: getattr(running, "num_restarts", 0), is_synthetic, counters
        )
        self.gate = Gate(client, self.metrics, settings.max_queue)
        self._news: list[AnswerWriter] = []  # writers to flush
        self._writers: dict[AnswerWriter, None] = {}  # whose answers are not complete
        writers = WriterContext(
            client,
            self.gate,
            self.metrics,
            speculative is not None,
            schedule=self._schedule,
            add=self._add_writer,
            drop=self._drop_writer,
        )
        ids = AnswerIds(number)
        fingerprint = fingerprint_of(client.config, self.model.name)
        routes = RouteContext(client, self.gate, self.model, ids, fingerprint)
        self._admission = AdmissionQueue(routes, writers)
        self._bridge = AsgiBridge(create_app(AppContext(client, self.model, ids.started, self.metrics)))
        uploads = FormLimits(max_file_bytes=settings.max_upload_bytes)
        self._speech = SpeechRoutes(SpeechContext(client, self.gate, self.metrics, self.model, uploads))
        self._api_key = None if settings.api_key is None else settings.api_key.encode()
        log = AccessLog(self.metrics, settings.log_requests)
        self.listener = Listener(_limits(settings), self._check, self._handle, log.note)
        if is_synthetic:
            self.listener.warnings.append(SYNTHETIC_WARNING)

    # --- requests

    def _check(self, request: HttpRequest) -> None:
        check_key(request, self._api_key)
        if request.path in SPEECH_ROUTES:
            request.max_body_bytes = self.settings.max_upload_bytes + _FORM_BYTES

    def _handle(self, exchange: Exchange) -> None:
        route = _ROUTES.get(exchange.request.path)
        if exchange.request.method != "POST":
            self._bridge.handle(exchange)
        elif route is not None:
            self._admission.add(exchange, route)
        elif exchange.request.path in SPEECH_ROUTES:
            self._speech.handle(exchange)
        else:
            self._bridge.handle(exchange)

    # --- answers

    def _schedule(self, writer: AnswerWriter) -> None:
        if not self._news:
            self._loop.call_soon(self._flush)
        self._news.append(writer)

    def _flush(self) -> None:
        news, self._news = self._news, []
        for writer in news:
            writer.flush()

    def _add_writer(self, writer: AnswerWriter) -> None:
        self._writers[writer] = None

    def _drop_writer(self, writer: AnswerWriter) -> None:
        self._writers.pop(writer, None)

    # --- the loop

    async def start(self, sockets: list[socket.socket]) -> None:
        self._loop = asyncio.get_running_loop()
        running: RunningEngine = self.client.running
        if isinstance(running, EngineLink):
            self._loop.add_reader(running.descriptor, self._read_engine, running)
            self.listener.on_tick = lambda: self._watch_engine(running)
            self._read_engine(running)  # earlier messages do not trigger the edge-triggered descriptor
        await self.listener.listen(sockets)
        # A full garbage collection over all imported objects takes longer than a thousand tokens.
        gc.collect()
        gc.freeze()

    def _read_engine(self, link: EngineLink) -> None:
        if link.read(_MESSAGES_A_TURN):
            self._loop.call_soon(self._read_engine, link)

    def _watch_engine(self, link: EngineLink) -> None:
        self._read_engine(link)
        link.note_time()

    async def shut_down(self, ends_now: Callable[[], bool] = lambda: False) -> None:
        """Accept no more requests, give those under way time to finish, and end the rest with an error."""
        gate, seconds = self.gate, self.settings.shutdown_timeout_s
        num_open, num_aborted = gate.num_open, gate.num_aborted
        if num_open:
            logger.info("shutting down: %d requests have %g s to finish", num_open, seconds)
        self.listener.stop_accepting()
        await self.listener.wait_until_idle(seconds, ends_now)
        gate.is_closed = True
        for writer in list(self._writers):
            writer.end_server()
        self._speech.end_all()
        await self.listener.close(_FLUSH_S)  # clients that do not read are not waited for longer
        self._admission.close()
        if isinstance(self.client.running, EngineLink):
            self._loop.remove_reader(self.client.running.descriptor)
        num_aborted = gate.num_aborted - num_aborted + gate.num_open
        logger.info("shut down: %d requests finished, %d aborted", num_open - num_aborted, num_aborted)


def _limits(settings: ServerSettings) -> ConnectionLimits:
    room = raise_descriptor_limit()
    most = room if settings.max_connections is None else min(room, settings.max_connections)
    return ConnectionLimits(
        max_connections=most,
        max_body_bytes=settings.max_body_bytes,
        body_timeout_s=settings.body_timeout_s,
        header_timeout_s=settings.header_timeout_s,
        keep_alive_s=settings.keep_alive_s,
    )
