"""One client's connection: requests are read one after the other, bounded in size and time, and answered in order.

Pipelined input waits unparsed until its turn. Every state has a deadline, which the listener enforces
(``listener.py``), except while the server itself is at work.
"""

from __future__ import annotations

import asyncio
import enum
import socket
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote

import httptools

from slipstream.server.errors import ApiError
from slipstream.server.http.exchange import Exchange, HttpRequest

if TYPE_CHECKING:
    from slipstream.server.http.listener import Listener

_SLICE = 16 << 10  # bytes parsed at a time, so that few pipelined requests are held as objects
_MOST_AHEAD = 64 << 10  # pipelined bytes that are buffered before reading pauses
_LARGEST_HEAD = 64 << 10
_SMALL_BODY = 64 << 10  # always has room, whatever other clients send
_MOST_HEADERS = 200
_WRITE_BUFFER = 64 << 10  # above this a client counts as too slow


class Phase(enum.Enum):
    IDLE = "idle"  # between requests, or before the first
    HEAD = "head"
    BODY = "body"
    ANSWERING = "answering"
    CLOSING = "closing"  # the answer is on its way, and nothing more is read


_UNFINISHED = (Phase.IDLE, Phase.HEAD, Phase.BODY)  # a connection in one of these may be closed to make room


class Connection(asyncio.Protocol):
    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._limits = listener.limits
        self.transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._parser: Any = httptools.HttpRequestParser(self)
        self._phase = Phase.IDLE
        self._arriving = Phase.IDLE  # where the parser is, which may be ahead of the answer: idle, head or body
        self._phase_deadline: float | None = None
        self._write_deadline: float | None = None  # while output is buffered
        self._num_unsent = 0  # when the deadline was set
        self.client: tuple[str, int] | None = None
        self.is_lost = False
        self.can_write = True
        self._ahead = bytearray()  # not parsed yet
        self._is_advancing = False
        self._ready: deque[HttpRequest] = deque()
        self._exchange: Exchange | None = None
        self._request = HttpRequest()  # the one being parsed
        self._body: list[bytes] = []
        self._num_head_bytes = 0
        self._num_body_bytes = 0
        self._body_start = 0.0
        self._refusal: ApiError | None = None

    @property
    def date(self) -> bytes:
        return self._listener.date

    @property
    def deadline(self) -> float | None:
        given = [at for at in (self._phase_deadline, self._write_deadline) if at is not None]
        return min(given, default=None)

    @property
    def is_answering(self) -> bool:
        return self._exchange is not None

    # --- the transport's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=_WRITE_BUFFER)
        self.client = transport.get_extra_info("peername")
        if (own := transport.get_extra_info("socket")) is not None:
            with suppress(OSError):  # a client that has left already
                own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._enter(Phase.IDLE, self._limits.header_timeout_s)
        self._listener.take(self)

    def data_received(self, data: bytes) -> None:
        if self._phase is Phase.CLOSING:
            return  # read and dropped, so that the client can still read its answer
        self._ahead += data
        self._advance()
        if len(self._ahead) > _MOST_AHEAD and not self.is_lost:
            self.transport.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        self._listener.lose(self)
        self._free_body()
        for request in self._ready:
            self._listener.free_body(request)
        self._ready.clear()
        if (exchange := self._exchange) is not None:
            self._exchange = None
            if exchange.on_gone is not None:
                exchange.on_gone()
            self._listener.end_exchange(exchange)
            exchange.on_gone = exchange.on_drained = None

    def pause_writing(self) -> None:
        self.can_write = False
        self._give_time_to_read()

    def resume_writing(self) -> None:
        self.can_write = True
        if self._phase is Phase.CLOSING:
            return
        self._write_deadline = None
        if self._exchange is None:
            self._await_request()
        elif self._exchange.on_drained is not None:
            self._exchange.on_drained()

    # --- the exchange's calls

    def send(self, data: bytes) -> None:
        if data and not self.is_lost:
            self.transport.write(data)

    def free_body(self, request: HttpRequest) -> None:
        self._listener.free_body(request)

    def finish(self, exchange: Exchange) -> None:
        """The answer is complete."""
        if self._exchange is not exchange:
            return
        self._exchange = None
        self._listener.end_exchange(exchange)
        exchange.on_gone = exchange.on_drained = None
        if not exchange.request.keeps_alive or self._listener.is_ending:
            self.close_gently()
            return
        self._await_request()

    # --- the listener's calls

    def expire(self) -> None:
        """The deadline has passed."""
        if self._write_deadline is not None and self._write_deadline < time.monotonic():
            if self.transport.get_write_buffer_size() < self._num_unsent:
                self._give_time_to_read()  # slow, but it makes progress
            else:
                self.abort()
        elif self._phase is Phase.BODY:
            self._refuse(ApiError(408, "the body did not arrive in time"))
        elif self._phase is Phase.HEAD:
            self._refuse(ApiError(408, "the request's headers did not arrive in time"))
        else:
            self.abort()

    def make_room(self) -> None:
        """A new client takes the slot of this connection, which has no request under way."""
        self.abort()

    def abort(self) -> None:
        self.transport.abort()

    def close_gently(self) -> None:
        """Output that was written is still sent. Input is dropped meanwhile: if unread, the kernel would send RST."""
        if self._phase is Phase.CLOSING:
            return
        self._enter(Phase.CLOSING, self._limits.linger_s)
        self._ahead.clear()
        self._free_body()
        if self.is_lost:
            return
        if self.transport.get_write_buffer_size():
            self._phase_deadline = None
            self._give_time_to_read()
        self.transport.resume_reading()
        if self.transport.can_write_eof():
            with suppress(OSError):
                self.transport.write_eof()

    def close_if_idle(self) -> None:
        if self._exchange is None:
            self.close_gently()

    # --- reading

    def _enter(self, phase: Phase, timeout_s: float | None) -> None:
        self._phase = phase
        self._phase_deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._listener.note_phase(self, phase in _UNFINISHED)

    def _give_time_to_read(self) -> None:
        self._num_unsent = self.transport.get_write_buffer_size()
        self._write_deadline = time.monotonic() + self._limits.write_timeout_s

    def _await_request(self) -> None:
        """Wait for the next request, part of which may have arrived. Its time limit starts here."""
        limits = self._limits
        if not self.can_write:
            self._enter(Phase.IDLE, None)
        elif self._arriving is Phase.IDLE:
            self._enter(Phase.IDLE, limits.keep_alive_s)
        elif self._arriving is Phase.HEAD:
            self._enter(Phase.HEAD, limits.header_timeout_s)
        else:
            self._enter(Phase.BODY, limits.body_timeout_s)
            self._body_start = time.monotonic()
        self.transport.resume_reading()
        self._advance()

    def _advance(self) -> None:
        """Parse what has arrived and start the next request, as far as possible.

        Stops while the client does not read its answers: otherwise those of all pipelined requests would pile up.
        """
        if self._is_advancing:
            return  # called from the loop below, by an answer that was complete at once
        self._is_advancing = True
        try:
            while self._exchange is None and self._phase is not Phase.CLOSING and self.can_write and not self.is_lost:
                if self._ready:
                    self._start(self._ready.popleft())
                elif self._ahead:
                    part = bytes(self._ahead[:_SLICE])
                    del self._ahead[:_SLICE]
                    self._parse(part)
                else:
                    break
        finally:
            self._is_advancing = False

    def _parse(self, data: bytes) -> None:
        if self._phase is Phase.IDLE:
            self._enter(Phase.HEAD, self._limits.header_timeout_s)
            self._num_head_bytes = 0
        num_body_bytes = self._num_body_bytes
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # Protocol upgrades are not offered: the request is answered as it is, and is the last one.
            for request in self._ready:
                request.keeps_alive = False
        except httptools.HttpParserError as error:
            if self._refusal is None:
                self._refusal = ApiError(400, f"this is not HTTP/1.1: {str(error) or type(error).__name__}")
        # Trailers and chunk extensions count against the header limit, as the parser stores them like headers.
        self._num_head_bytes = 0 if self._num_body_bytes > num_body_bytes else self._num_head_bytes + len(data)
        if self._num_head_bytes > _LARGEST_HEAD and not self._ready:
            self._refusal = self._refusal or _head_too_large()
        if self._phase is Phase.BODY:
            pause_s = self._limits.body_timeout_s
            # A byte now and then does not extend the deadline.
            longest_s = self._limits.longest_body * pause_s
            self._phase_deadline = min(time.monotonic() + pause_s, self._body_start + longest_s)
        if self._refusal is not None and not self._ready:
            self._refuse(self._refusal)

    def _start(self, request: HttpRequest) -> None:
        self._enter(Phase.ANSWERING, None)
        self._exchange = self._listener.begin_exchange(self, request)
        if not self._ready and self._refusal is not None:
            request.keeps_alive = False  # what follows it cannot be parsed

    def _refuse(self, refusal: ApiError) -> None:
        """Answer the request with an error and close: what follows cannot be told from the rest of its body."""
        request = self._request
        request.keeps_alive = False
        self._free_body()
        self._enter(Phase.ANSWERING, None)
        self._exchange = self._listener.open_exchange(self, request)
        self._exchange.respond_json(refusal.status, refusal.body, refusal.headers)

    def _free_body(self) -> None:
        self._listener.num_buffered_bytes -= self._num_body_bytes
        self._num_body_bytes = 0
        self._body.clear()

    # --- the parser's calls

    def on_message_begin(self) -> None:
        self._arriving = Phase.HEAD
        self._request = HttpRequest(arrival_time=time.monotonic(), headers=[])
        self._num_head_bytes = 0
        self._target: list[bytes] = []

    def on_url(self, url: bytes) -> None:
        self._target.append(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._arriving is Phase.BODY:
            return  # trailers after a body are not headers: the request was checked before them
        headers = self._request.headers
        headers.append((name.lower(), value))
        if len(headers) > _MOST_HEADERS:
            self._stop(ApiError(431, f"there are more than {_MOST_HEADERS} headers"))

    def on_headers_complete(self) -> None:
        request, parser = self._request, self._parser
        self._arriving = Phase.BODY
        self._num_head_bytes = 0
        request.method = parser.get_method().decode("ascii", "replace")
        request.version = parser.get_http_version()
        request.keeps_alive = parser.should_keep_alive()
        request.target = b"".join(self._target)
        if len(request.target) + sum(len(name) + len(value) for name, value in request.headers) > _LARGEST_HEAD:
            self._stop(_head_too_large())
        self._read_target(request)
        try:
            self._listener.check(request)
        except ApiError as refusal:  # before its body is read
            self._stop(refusal)
        self._enter(Phase.BODY, self._limits.body_timeout_s)
        self._body_start = time.monotonic()
        length = request.header(b"content-length")
        if length is not None and length.isdigit() and int(length[:20]) > self._max_body_bytes:
            self._stop(self._too_large())
        elif request.header(b"expect") is not None and request.version == "1.1":
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _read_target(self, request: HttpRequest) -> None:
        try:
            url = httptools.parse_url(request.target)
        except httptools.HttpParserInvalidURLError:
            self._stop(ApiError(400, "the request's target is not a valid URL"))
            return
        request.path = unquote((url.path or b"/").decode("ascii", "replace"))
        request.query = url.query or b""

    def on_body(self, data: bytes) -> None:
        self._body.append(data)
        self._num_body_bytes += len(data)
        self._listener.num_buffered_bytes += len(data)
        if self._num_body_bytes > self._max_body_bytes:
            self._stop(self._too_large())
        elif self._num_body_bytes > _SMALL_BODY and self._listener.num_buffered_bytes > self._limits.max_buffered_bytes:
            self._stop(ApiError(503, "too many bodies arrive at once; try again later", headers={"Retry-After": "1"}))

    def on_message_complete(self) -> None:
        self._request.body = b"".join(self._body)
        self._request.num_buffered_bytes, self._num_body_bytes = self._num_body_bytes, 0
        self._body.clear()
        self._ready.append(self._request)
        self._arriving = Phase.IDLE
        self._phase = Phase.IDLE  # of the next request; the one that was started keeps its own state

    def _stop(self, refusal: ApiError) -> None:
        self._refusal = refusal
        raise refusal

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_body_bytes} bytes")

    @property
    def _max_body_bytes(self) -> int:
        own = self._request.max_body_bytes
        return self._limits.max_body_bytes if own is None else own


def _head_too_large() -> ApiError:
    return ApiError(431, f"the headers are larger than {_LARGEST_HEAD} bytes")
