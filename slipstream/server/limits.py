"""What is refused before anybody looks at it: bodies too large or too slow, and strangers."""

from __future__ import annotations

import asyncio
import hmac

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.server.errors import ApiError

# What monitors and load balancers ask, and the documentation, need no key.
_OPEN_PATHS = ("/health", "/metrics", "/version", "/docs", "/redoc", "/openapi.json")


_LONGEST_BODY = 4  # of the longest pauses


class Limits:
    """Before everything but the log. The whole body is read here, so that nothing behind waits for a slow client."""

    def __init__(self, app: ASGIApp, max_body_bytes: int, body_timeout_s: float, api_key: str | None) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._api_key = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check_key(scope)
            body = await self._read(scope, receive)
        except ApiError as error:
            headers = {**error.headers, "Connection": "close"}
            await JSONResponse(error.body, error.status, headers)(scope, receive, send)
            return
        except ConnectionResetError:
            return
        await self._app(scope, _replayed(body, receive), send)

    def _check_key(self, scope: Scope) -> None:
        if self._api_key is None or scope["path"].startswith(_OPEN_PATHS):
            return
        sent = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if not hmac.compare_digest(sent, self._api_key):
            raise ApiError(
                401, "a valid API key is needed: Authorization: Bearer ...", headers={"WWW-Authenticate": "Bearer"}
            )

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        headers = dict(scope["headers"])
        announced = headers.get(b"content-length", b"0")
        self._check_size(int(announced) if announced.isdigit() else 0)
        body = bytearray()
        clock = asyncio.get_running_loop().time
        deadline = clock() + _LONGEST_BODY * self._body_timeout_s  # a byte now and then does not help
        while True:
            try:
                message = await asyncio.wait_for(receive(), min(self._body_timeout_s, deadline - clock()))
            except TimeoutError:
                raise ApiError(408, "the body did not arrive in time") from None
            if message["type"] == "http.disconnect":
                raise ConnectionResetError
            body += message.get("body", b"")
            self._check_size(len(body))
            if not message.get("more_body"):
                return bytes(body)

    def _check_size(self, size: int) -> None:
        if size > self._max_body_bytes:
            raise ApiError(413, f"the body is larger than {self._max_body_bytes} bytes")


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body once more for the application, then whatever the client does: it can only hang up."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
