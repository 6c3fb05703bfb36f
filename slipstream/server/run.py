"""Starting the server, and ending it without losing anybody's answer."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import sys

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from slipstream.config import EngineOptions, speculation_of
from slipstream.engine.client import EngineClient
from slipstream.engine.process import EngineProcess
from slipstream.errors import ConfigError
from slipstream.server.app import Server, create_app
from slipstream.server.settings import ServerSettings
from slipstream.types import SYNTHETIC_WARNING

_LARGEST_HEADERS = 64 << 10
_LAST_WORDS_S = 1  # for the error that ends an answer, once the time to finish it is up


def serve(options: EngineOptions, settings: ServerSettings) -> int:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    speculative = speculation_of(options)
    if speculative is not None and speculative.is_synthetic:
        logging.warning(SYNTHETIC_WARNING)
    listener = _listen(settings)  # first: a port that is taken should not cost the loading of a model
    client = EngineClient(lambda deliver: EngineProcess(options, deliver))
    server = Server(client, options.model, settings)

    listener.listen(2048)  # from here on nobody is turned away
    host, port = listener.getsockname()[:2]
    logging.info("serving %s on http://%s:%s", server.model_name, host, port)
    GracefulServer(server, create_app(server)).run(sockets=[listener])
    return 0


class GracefulServer(uvicorn.Server):
    """Says what becomes of the requests under way, and ends the engine: afterwards the signal ends this process."""

    def __init__(self, server: Server, app: ASGIApp) -> None:
        config = uvicorn.Config(
            _without_traces(app, server),
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=math.ceil(server.settings.shutdown_timeout_s) + _LAST_WORDS_S,
            h11_max_incomplete_event_size=_LARGEST_HEADERS,
            http="h11",
        )
        super().__init__(config)
        self._server = server

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        gate, seconds = self._server.gate, self._server.settings.shutdown_timeout_s
        if gate.num_open:
            logging.info("shutting down: %d requests have %g s to finish", gate.num_open, seconds)
        num_open, num_aborted = gate.num_open, gate.num_aborted
        closing = asyncio.get_running_loop().call_later(seconds, gate.close)
        await super().shutdown(sockets)
        closing.cancel()
        gate.close()  # a second signal does not wait that long
        if self.server_state.tasks:  # their clients do not read
            await asyncio.wait(list(self.server_state.tasks), timeout=_LAST_WORDS_S)
        num_aborted = gate.num_aborted - num_aborted + gate.num_open
        logging.info("shut down: %d requests finished, %d aborted", num_open - num_aborted, num_aborted)
        await asyncio.to_thread(self._server.client.close)


def _without_traces(app: ASGIApp, server: Server) -> ASGIApp:
    """A request that the shutdown cancels has no fault to be found: uvicorn's one line about it is enough."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:
            if not server.gate.is_closed:
                raise

    return run


def _listen(settings: ServerSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {settings.host} port {settings.port}: {error.strerror}") from error
    return listener
