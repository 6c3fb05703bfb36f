"""All connections of one front end: accepted, counted, timed out and closed.

At the limit a new client replaces the connection that has waited longest without a complete request, so that clients
that open connections and send nothing cannot keep others out. Few are accepted at a time, so that a long backlog never
opens more descriptors than the limit allows; asyncio's own server accepts all at once, and when descriptors run out it
logs thousands of lines and accepts nothing for seconds.
"""

from __future__ import annotations

import asyncio
import logging
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
_ACCEPTED_A_TURN = 16
_ACCEPT_PAUSE_S = 0.1  # when the system has no descriptor left
_WARN_EVERY_S = 10.0
logger = logging.getLogger("slipstream.server")

_USABLE_ID = re.compile(rb"[ -~]{1,128}")


class Listener:
    """``check`` refuses a request by its headers, ``handle`` answers it, ``note_end`` is called when it is over."""

    def __init__(
        self,
        limits: ConnectionLimits,
        check: Callable[[HttpRequest], None],
        handle: Callable[[Exchange], None],
        note_end: Callable[[Exchange], None],
    ) -> None:
        self.limits = limits
        self.check = check
        self.handle = handle
        self._note_end = note_end
        self.connections: dict[Connection, None] = {}
        self._unfinished: dict[Connection, None] = {}  # without a complete request, the longest waiting first
        self._sockets: list[socket.socket] = []
        self._arriving: set[asyncio.Task[None]] = set()
        self._num_descriptors = 0  # of clients, connections being opened or closed included
        self._warned_at: float | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self.on_tick: Callable[[], None] = lambda: None
        self.warnings: list[str] = []  # sent with every response
        self.num_buffered_bytes = 0
        self.is_ending = False
        self.date = _date_now()

    # --- calls of the owner

    async def listen(self, sockets: list[socket.socket]) -> None:
        loop = asyncio.get_running_loop()
        for own in sockets:
            own.setblocking(False)
            own.listen(_BACKLOG)
            self._sockets.append(own)
            loop.add_reader(own, self._accept, own)
        self._tick()

    @property
    def num_connections(self) -> int:
        return len(self.connections)

    def stop_accepting(self) -> None:
        """Requests under way go on; connections without one are closed."""
        self.is_ending = True
        for own in self._sockets:
            asyncio.get_running_loop().remove_reader(own)
            own.close()
        for connection in list(self.connections):
            connection.close_if_idle()

    async def wait_until_idle(self, timeout_s: float, ends_now: Callable[[], bool]) -> None:
        """Wait until every response is complete, the time is up, or ``ends_now`` says so."""
        clock = asyncio.get_running_loop().time
        end = clock() + timeout_s
        while any(connection.is_answering for connection in self.connections):
            if clock() >= end or ends_now():
                return
            await asyncio.sleep(0.01)

    async def close(self, flush_s: float) -> None:
        """Flush written output for a while, then close every connection."""
        clock = asyncio.get_running_loop().time
        end = clock() + flush_s
        while self.connections and clock() < end:
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.abort()
        if self._ticking is not None:
            self._ticking.cancel()
        await asyncio.sleep(0)  # lets the transports call connection_lost

    # --- accepting

    def _accept(self, own: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(_ACCEPTED_A_TURN):
            if self._num_descriptors >= self.limits.max_connections + _ACCEPTED_A_TURN:
                return  # some are being closed; the event loop calls again at once
            try:
                client, _ = own.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._pause_accepting(own, error)
                return
            self._num_descriptors += 1
            task = loop.create_task(self._adopt(client))
            self._arriving.add(task)  # the event loop holds only weak references to tasks
            task.add_done_callback(self._arriving.discard)

    async def _adopt(self, client: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: Connection(self), client)
        except OSError:  # the client has disconnected already
            client.close()
            self._num_descriptors -= 1

    def _pause_accepting(self, own: socket.socket, error: OSError) -> None:
        loop, now = asyncio.get_running_loop(), time.monotonic()
        if self._warned_at is None or now - self._warned_at > _WARN_EVERY_S:
            self._warned_at = now
            logger.warning("no connection can be accepted for a moment: %s", error)
        loop.remove_reader(own)
        loop.call_later(_ACCEPT_PAUSE_S, self._resume_accepting, own)

    def _resume_accepting(self, own: socket.socket) -> None:
        if not self.is_ending:
            asyncio.get_running_loop().add_reader(own, self._accept, own)

    # --- calls of the connections

    def take(self, connection: Connection) -> None:
        if len(self.connections) >= self.limits.max_connections:
            # Connections with a request under way are never replaced: then the new one is closed.
            oldest = next((other for other in self._unfinished if other is not connection), connection)
            oldest.make_room()
            self.drop(oldest)
        self.connections[connection] = None

    def drop(self, connection: Connection) -> None:
        self.connections.pop(connection, None)
        self._unfinished.pop(connection, None)

    def lose(self, connection: Connection) -> None:
        """Its descriptor is closed now."""
        self.drop(connection)
        self._num_descriptors -= 1

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
            self.handle(exchange)

    def open_exchange(self, connection: Connection, request: HttpRequest) -> Exchange:
        exchange = Exchange(connection, request, _read_request_id(request))
        exchange.headers.append((b"x-request-id", exchange.request_id.encode()))
        exchange.warnings += self.warnings
        return exchange

    def free_body(self, request: HttpRequest) -> None:
        """Its body is not needed any more."""
        self.num_buffered_bytes -= request.num_buffered_bytes
        request.num_buffered_bytes = 0

    def end_exchange(self, exchange: Exchange) -> None:
        self.free_body(exchange.request)
        self._note_end(exchange)

    def _tick(self) -> None:
        now = time.monotonic()
        self.date = _date_now()
        for connection in list(self.connections):
            if connection.deadline is not None and connection.deadline < now:
                connection.expire()
        self.on_tick()
        self._ticking = asyncio.get_running_loop().call_later(_TICK_S, self._tick)


def _date_now() -> bytes:
    return formatdate(usegmt=True).encode()


def _read_request_id(request: HttpRequest) -> str:
    """The client's own id, if it is valid in a header and in a log line."""
    given = request.header(b"x-request-id")
    return given.decode() if given is not None and _USABLE_ID.fullmatch(given) else uuid.uuid4().hex
