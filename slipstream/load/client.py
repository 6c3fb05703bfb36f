"""Requests sent and responses read by one process: many connections, one thread, its own event loop.

asyncio takes 13 microseconds for a read of one event; reading the ready sockets directly takes 4, system time
included. Times are those of the reads.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipstream.load.poller import READ, WRITE, Poller, make_poller
from slipstream.load.records import Recorder
from slipstream.load.response import Response
from slipstream.load.target import Target

READ_BYTES = 65536
# An idle connection that is lost sooner than this after sending was closed by the server before it saw the request.
_STALE_S = 0.1
TICK_S = 0.25  # between checks for silent servers, and progress reports

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Script:
    """What to send: request bodies in order, and either the number of streams or the time at which each is due."""

    bodies: Sequence[bytes]
    streams: int | None = None  # closed loop: each stream sends its next request when one has ended
    due: Sequence[float] = ()  # open loop: seconds after the start, ascending


class Connection:
    """One connection and the request on it, if any."""

    __slots__ = (
        "due",
        "fd",
        "is_connecting",
        "last_read",
        "num_answers",
        "recv",
        "request_idx",
        "response",
        "socket",
        "start",
        "unsent",
    )

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.fd = connection.fileno()
        self.recv = connection.recv
        self.is_connecting = True
        self.num_answers = 0
        self.response: Response | None = None  # None while idle
        self.request_idx = 0
        self.start = self.due = self.last_read = 0.0
        self.unsent = memoryview(b"")


class LoadClient:
    """Runs one script against one server."""

    def __init__(
        self,
        target: Target,
        head: bytes,  # of every request, up to the value of Content-Length
        script: Script,
        *,
        timeout_s: float,
        clock: Clock = time.monotonic,
        poller: Poller | None = None,
    ) -> None:
        self.recorder = Recorder()
        self._target, self._head, self._script = target, head, script
        self._timeout_s, self._clock = timeout_s, clock
        self._poller = poller or make_poller()
        self._connections: dict[int, Connection] = {}
        self._idle: dict[int, Connection] = {}
        self._closed: list[socket.socket] = []
        self._next = 0  # the next request to send
        self._num_active = 0
        self._num_free = 0  # streams of a closed loop without a request
        self._is_stopped = False

    def stop(self) -> None:
        """Send nothing more and count requests under way as unfinished."""
        self._is_stopped = True

    def run(self, origin: float, on_tick: Callable[[Recorder], None] | None = None, control: int | None = None) -> None:
        """Send everything and read every response. ``on_tick`` is called regularly, and when ``control`` is readable.

        The script's times count from ``origin``.
        """
        if control is not None:
            self._poller.register(control, READ)
        try:
            tick_at = self._clock() + TICK_S
            if self._script.streams is not None:
                self._num_free = self._script.streams
                self._fill_streams()
            while not self._is_stopped and (self._num_active or self._next < len(self._script.bodies)):
                now = self._clock()
                wait = tick_at - now
                if self._script.streams is None and self._next < len(self._script.bodies):
                    wait = min(wait, self._send_due(origin, now) - now)
                self._poll(max(0.0, wait), control, on_tick)
                if (now := self._clock()) >= tick_at:
                    tick_at = now + TICK_S
                    self._fail_silent(now)
                    if on_tick is not None:
                        on_tick(self.recorder)
        finally:
            self._close_all()

    def _poll(self, wait: float, control: int | None, on_tick: Callable[[Recorder], None] | None) -> None:
        """The hot path: every read of every stream goes through this loop."""
        connections, clock = self._connections, self._clock
        for fd, mask in self._poller.poll(wait):
            connection = connections.get(fd)
            if connection is None:
                if fd == control and on_tick is not None:
                    on_tick(self.recorder)
                continue
            if mask == WRITE:  # otherwise read first: an early response or an error
                self._write(connection)
                continue
            try:
                data = connection.recv(READ_BYTES)
            except BlockingIOError:
                continue
            except OSError as error:
                self._lose(connection, _reason(error))
                continue
            now = clock()
            response = connection.response
            if not data:
                self._end_of_file(connection, now)
            elif response is None:
                self._close(connection)  # bytes without a request
            else:
                connection.last_read = now
                response.feed(data, now)
                if response.is_complete:
                    self._finish(connection, now)
        self._fill_streams()
        # Only now: a new connection that reuses a closed one's number would receive its events.
        for own in self._closed:
            own.close()
        self._closed.clear()

    def _send_due(self, origin: float, now: float) -> float:
        """Send what is due by now, and return when the next request is due."""
        due, count = self._script.due, len(self._script.bodies)
        while self._next < count and origin + due[self._next] <= now:
            self._begin(origin + due[self._next])
        return origin + due[self._next] if self._next < count else now + TICK_S

    def _begin(self, due: float | None = None) -> None:
        """Send the next request, on a connection that is idle or on a new one."""
        idx, self._next = self._next, self._next + 1
        self._num_active += 1
        start = self._clock()
        self._send(self._idle.popitem()[1] if self._idle else None, idx, start, start if due is None else due)

    def _fill_streams(self) -> None:
        """In a closed loop, give every free stream a request."""
        while self._num_free and self._next < len(self._script.bodies) and not self._is_stopped:
            self._num_free -= 1
            self._begin()

    def _send(self, connection: Connection | None, idx: int, start: float, due: float) -> None:
        if connection is None:
            try:
                connection = self._connect()
            except OSError as error:
                self._count_failure(_reason(error), start, due)
                return
        body = self._script.bodies[idx]
        connection.request_idx, connection.start, connection.due, connection.last_read = idx, start, due, start
        connection.response = Response()
        connection.unsent = memoryview(b"%b%d\r\n\r\n%b" % (self._head, len(body), body))
        if not connection.is_connecting:
            self._write(connection)

    def _connect(self) -> Connection:
        own = socket.socket(self._target.family, socket.SOCK_STREAM)
        try:
            own.setblocking(False)
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            code = own.connect_ex(self._target.address)
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, os.strerror(code))
        except OSError:
            own.close()
            raise
        connection = Connection(own)
        self._connections[connection.fd] = connection
        self._poller.register(connection.fd, READ | WRITE)
        return connection

    def _write(self, connection: Connection) -> None:
        """Send as much as the socket takes."""
        try:
            if connection.is_connecting:
                if code := connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    raise OSError(code, os.strerror(code))
                connection.is_connecting = False
            if connection.unsent:
                connection.unsent = connection.unsent[connection.socket.send(connection.unsent) :]
        except BlockingIOError:
            pass
        except OSError as error:
            self._lose(connection, _reason(error))
            return
        self._poller.modify(connection.fd, READ | WRITE if connection.unsent else READ)

    def _end_of_file(self, connection: Connection, now: float) -> None:
        response = connection.response
        if response is None:
            self._close(connection)
        elif not response.has_begun:
            self._lose(connection, "closed before an answer")
        else:
            response.close(now)
            self._finish(connection, now)

    def _lose(self, connection: Connection, reason: str) -> None:
        """The connection failed. A server may close an idle one just as we send: then the request is sent once more."""
        response, idx = connection.response, connection.request_idx
        was_stale = connection.num_answers > 0 and self._clock() - connection.last_read < _STALE_S
        self._close(connection)
        if response is not None and was_stale and not response.has_begun:
            self._send(None, idx, connection.start, connection.due)
        elif response is not None:
            self._count_failure(reason, connection.start, connection.due)

    def _finish(self, connection: Connection, now: float) -> None:
        response = connection.response
        assert response is not None
        connection.response = None
        connection.num_answers += 1
        self._record(connection.start, connection.due, now, response)
        if response.keeps_connection and not connection.unsent:
            self._idle[connection.fd] = connection
        else:
            self._close(connection)
        self._fill_streams()

    def _count_failure(self, reason: str, start: float, due: float) -> None:
        response = Response()
        response.failure = reason
        self._record(start, due, self._clock(), response)

    def _record(self, start: float, due: float, end: float, response: Response) -> None:
        self._num_active -= 1
        if self._script.streams is not None:
            self._num_free += 1
        self.recorder.add(start, due, end, response)

    def _fail_silent(self, now: float) -> None:
        for connection in list(self._connections.values()):
            if connection.response is not None and now - connection.last_read > self._timeout_s:
                start, due = connection.start, connection.due
                self._close(connection)
                self._count_failure(f"silent for more than {self._timeout_s:g} s", start, due)

    def _close(self, connection: Connection) -> None:
        self._poller.unregister(connection.fd)
        del self._connections[connection.fd]
        self._idle.pop(connection.fd, None)
        self._closed.append(connection.socket)

    def _close_all(self) -> None:
        now = self._clock()
        for connection in list(self._connections.values()):
            if connection.response is not None:
                self.recorder.add_unfinished(connection.start, connection.due, now)
            self._close(connection)
        for own in self._closed:
            own.close()
        self._poller.close()


def _reason(error: OSError) -> str:
    """A text that is the same for all failures of a kind."""
    names = {
        errno.ECONNREFUSED: "connection refused",
        errno.ECONNRESET: "connection reset",
        errno.EPIPE: "closed early",
    }
    return names.get(error.errno or 0, (error.strerror or str(error)).lower())
