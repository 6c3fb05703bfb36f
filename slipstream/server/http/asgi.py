"""Requests that an ASGI application answers: all routes except those that generate."""

from __future__ import annotations

import asyncio
import logging

from starlette.types import ASGIApp, Message, Scope

from slipstream.server.errors import ApiError
from slipstream.server.http.exchange import Exchange

logger = logging.getLogger("slipstream.server")


class AsgiBridge:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._tasks: set[asyncio.Task[None]] = set()

    def handle(self, exchange: Exchange) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(exchange))
        self._tasks.add(task)  # the event loop holds only weak references to tasks
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, exchange: Exchange) -> None:
        gone = asyncio.Event()
        exchange.on_gone = gone.set
        body: bytes | None = exchange.request.body
        started: tuple[int, list[tuple[bytes, bytes]]] | None = None

        async def receive() -> Message:
            nonlocal body
            if body is not None:
                message: Message = {"type": "http.request", "body": body, "more_body": False}
                body = None
                return message
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = message["status"], list(message.get("headers", ()))
                return
            assert started is not None, "the application sent a body before its status"
            data, goes_on = message.get("body", b""), message.get("more_body", False)
            if exchange.status is None:
                status, headers = started
                length = next((int(value) for name, value in headers if name.lower() == b"content-length"), None)
                rest = [(name, value) for name, value in headers if name.lower() != b"content-length"]
                exchange.start(status, rest, len(data) if length is None and not goes_on else length)
            if not goes_on:
                exchange.end(data)
            elif data and exchange.request.method != "HEAD":
                exchange.write(data)

        try:
            await self._app(_scope(exchange), receive, send)
        except Exception as error:  # an application error fails one request only
            logger.exception("a request failed: %s %s", exchange.request.method, exchange.request.path)
            if exchange.status is None:
                exchange.respond_json(500, ApiError(500, f"{type(error).__name__}: {error}").body)
        finally:
            if not exchange.is_complete:
                exchange.close_after()
                exchange.end()


def _scope(exchange: Exchange) -> Scope:
    request = exchange.request
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": request.version,
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.target.partition(b"?")[0],
        "query_string": request.query,
        "root_path": "",
        "headers": request.headers,
        "client": exchange.client,
        "server": None,
    }
