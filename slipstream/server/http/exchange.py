"""One request and its response, as the rest of the server sees them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.server.http.connection import Connection

Headers = list[tuple[bytes, bytes]]

_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus} | {499: b"Client Closed Request"}
WARNING_HEADER = b"x-slipstream-warning"  # the request was served otherwise than asked
_NO_BODY = (204, 304)
_JSON = b"application/json"


@dataclass(slots=True, eq=False)
class HttpRequest:
    """A request that has arrived whole. Names of headers are in lower case."""

    method: str = "GET"
    target: bytes = b"/"  # as it was sent
    path: str = "/"
    query: bytes = b""
    version: str = "1.1"
    headers: Headers = field(default_factory=list)
    body: bytes = b""
    keeps_alive: bool = True
    arrival_time: float = 0.0
    num_buffered_bytes: int = 0  # of its body, while the listener counts them
    max_body_bytes: int | None = None  # where its route allows another size than the others

    def header(self, name: bytes) -> bytes | None:
        return next((value for own, value in self.headers if own == name), None)


class Exchange:
    """The answer is written in one piece with ``respond``, or with ``start``, any number of ``write`` and ``end``.

    Nothing here waits. A client that reads too slowly makes ``keeps_up`` false; ``on_drained`` is called when it has
    caught up, and ``on_gone`` when it has disconnected before the response was complete.
    """

    __slots__ = (
        "_connection",
        "_head",
        "_is_chunked",
        "headers",
        "is_complete",
        "note",
        "on_drained",
        "on_gone",
        "request",
        "request_id",
        "status",
        "warnings",
    )

    def __init__(self, connection: Connection, request: HttpRequest, request_id: str) -> None:
        self._connection = connection
        self.request = request
        self.request_id = request_id
        self.status: int | None = None  # None until the response has begun
        self.headers: Headers = []  # of every response to this request
        self.warnings: list[str] = []  # in one header of the answer
        self.is_complete = False
        self.note: Any = None  # what a route adds to the log line
        self.on_gone: Callable[[], None] | None = None
        self.on_drained: Callable[[], None] | None = None
        self._head = b""  # not written yet: sent with the first part of the body
        self._is_chunked = False

    @property
    def client(self) -> tuple[str, int] | None:
        return self._connection.client

    @property
    def is_open(self) -> bool:
        """Whether the client is connected and the response is not complete."""
        return not self.is_complete and not self._connection.is_lost

    @property
    def keeps_up(self) -> bool:
        return self._connection.can_write

    def start(self, status: int, headers: Headers, length: int | None = None) -> None:
        """``length``: of the body, where it is known."""
        self.status = status
        request = self.request
        has_body = request.method != "HEAD" and status not in _NO_BODY
        lines = [b"HTTP/1.1 %d %b" % (status, _REASONS.get(status, b"")), b"date: " + self._connection.date]
        lines += [b"%b: %b" % header for header in (*headers, *self.headers)]
        if self.warnings:
            lines.append(b"%b: %b" % (WARNING_HEADER, "; ".join(self.warnings).encode()))
        if length is not None:
            lines.append(b"content-length: %d" % length)
        elif has_body and request.version == "1.1":
            self._is_chunked = True
            lines.append(b"transfer-encoding: chunked")
        elif has_body:
            request.keeps_alive = False  # the body ends where the connection does
        if not request.keeps_alive:
            lines.append(b"connection: close")
        elif request.version == "1.0":
            lines.append(b"connection: keep-alive")
        self._head = b"\r\n".join((*lines, b"", b""))

    def write(self, data: bytes) -> None:
        """A non-empty part of the body. Dropped if the client has disconnected."""
        if self._is_chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        if self._head:
            data, self._head = self._head + data, b""
        self._connection.send(data)

    def end(self, data: bytes = b"") -> None:
        if self.is_complete:
            return
        if self._is_chunked:
            data = (b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)) if data else b"0\r\n\r\n"
        self.is_complete = True
        if self.request.method == "HEAD":
            data = b""
        self._connection.send(self._head + data)
        self._head = b""
        self._connection.finish(self)

    def respond(self, status: int, body: bytes, content_type: bytes, headers: Headers | None = None) -> None:
        self.start(status, [(b"content-type", content_type), *(headers or ())], len(body))
        self.end(body)

    def respond_json(self, status: int, content: Any, headers: Mapping[str, str] | None = None) -> None:
        body = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
        self.respond(
            status, body, _JSON, [(name.lower().encode(), text.encode()) for name, text in (headers or {}).items()]
        )

    def drop_body(self) -> None:
        """Free the body once it was read: it may be large, and the response long."""
        self.request.body = b""
        self._connection.free_body(self.request)

    def close_after(self) -> None:
        """Close the connection after this response."""
        self.request.keeps_alive = False

    def seconds(self) -> float:
        return time.monotonic() - self.request.arrival_time
