"""All connections of one front end: accepted, counted, timed out, and ended.

At the limit a new client takes the place of the one that has waited longest without a whole request: clients that
open connections and say nothing keep no other out.
"""

from __future__ import annotations

import asyncio
import re
import socket
import time
import uuid
from collections.abc import Callable
from email.utils import formatdate

from slipstream.server.http.connection import Connection
from slipstream.server.http.exchange import Exchange, HttpRequest
from slipstream.server.http.limits import ConnectionLimits

_TICK_S = 0.5  # how late a deadline is noticed
_BACKLOG = 2048
_USABLE_ID = re.compile(rb"[ -~]{1,128}")


class Listener:
    """``check`` refuses a request by its headers, ``handle`` answers it, ``note_end`` is told when it is over."""

    def __init__(
        self,
        limits: ConnectionLimits,
        check: Callable[[HttpRequest], None],
        handle: Callable[[Exchange], None],
        note_end: Callable[[Exchange], None],
    ) -> None:
        self.limits = limits
        self.check = check
        self._handle = handle
        self._note_end = note_end
        self._connections: dict[Connection, None] = {}
        self._unfinished: dict[Connection, None] = {}  # without a whole request, the longest first
        self._servers: list[asyncio.Server] = []
        self._ticking: asyncio.TimerHandle | None = None
        self.on_tick: Callable[[], None] = lambda: None
        self.warnings: list[str] = []  # that every answer carries
        self.num_buffered_bytes = 0
        self.is_ending = False
        self.date = _date_now()

    # --- its owner's calls

    async def listen(self, sockets: list[socket.socket]) -> None:
        loop = asyncio.get_running_loop()
        for own in sockets:
            own.setblocking(False)
            self._servers.append(await loop.create_server(lambda: Connection(self), sock=own, backlog=_BACKLOG))
        self._tick()

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    def stop_accepting(self) -> None:
        """Requests under way go on; connections without one are closed."""
        self.is_ending = True
        for server in self._servers:
            server.close()
        for connection in list(self._connections):
            connection.close_if_idle()

    async def wait_until_idle(self, timeout_s: float, ends_now: Callable[[], bool]) -> None:
        """Until every answer is complete, as far as the time goes, unless there is none left."""
        clock = asyncio.get_running_loop().time
        end = clock() + timeout_s
        while any(connection.is_answering for connection in self._connections):
            if clock() >= end or ends_now():
                return
            await asyncio.sleep(0.01)

    async def close(self, flush_s: float) -> None:
        """Let what was written go out for a while, then end every connection."""
        clock = asyncio.get_running_loop().time
        end = clock() + flush_s
        while self._connections and clock() < end:
            await asyncio.sleep(0.01)
        for connection in list(self._connections):
            connection.abort()
        if self._ticking is not None:
            self._ticking.cancel()
        await asyncio.sleep(0)  # lets the transports tell their connections

    # --- the connections' calls

    def take(self, connection: Connection) -> None:
        if len(self._connections) >= self.limits.max_connections:
            # One that has a request under way keeps its place: then the new one goes.
            oldest = next((other for other in self._unfinished if other is not connection), connection)
            oldest.make_room()
            self.drop(oldest)
        self._connections[connection] = None

    def drop(self, connection: Connection) -> None:
        self._connections.pop(connection, None)
        self._unfinished.pop(connection, None)

    def note_phase(self, connection: Connection, is_unfinished: bool) -> None:
        if is_unfinished:
            self._unfinished.setdefault(connection)
        else:
            self._unfinished.pop(connection, None)

    def begin_exchange(self, connection: Connection, request: HttpRequest) -> Exchange:
        exchange = self.open_exchange(connection, request)
        asyncio.get_running_loop().call_soon(self._begin, exchange)
        return exchange

    def _begin(self, exchange: Exchange) -> None:
        if exchange.is_open:
            self._handle(exchange)

    def open_exchange(self, connection: Connection, request: HttpRequest) -> Exchange:
        exchange = Exchange(connection, request, _read_request_id(request))
        exchange.headers.append((b"x-request-id", exchange.request_id.encode()))
        exchange.warnings += self.warnings
        return exchange

    def free_body(self, request: HttpRequest) -> None:
        """Its body is needed no more."""
        self.num_buffered_bytes -= request.num_buffered_bytes
        request.num_buffered_bytes = 0

    def end_exchange(self, exchange: Exchange) -> None:
        self.free_body(exchange.request)
        self._note_end(exchange)

    def _tick(self) -> None:
        now = time.monotonic()
        self.date = _date_now()
        for connection in list(self._connections):
            if connection.deadline is not None and connection.deadline < now:
                connection.expire()
        self.on_tick()
        self._ticking = asyncio.get_running_loop().call_later(_TICK_S, self._tick)


def _date_now() -> bytes:
    return formatdate(usegmt=True).encode()


def _read_request_id(request: HttpRequest) -> str:
    """The client's own, if it can stand in a header and in a line of the log."""
    given = request.header(b"x-request-id")
    return given.decode() if given is not None and _USABLE_ID.fullmatch(given) else uuid.uuid4().hex
