"""A server whose time is made up: real sockets, but the clock moves only when the client waits.

The client under test is given the clock and a poller. When nothing is ready to be read or written, the poller moves
the clock to the server's next act, or to the end of the wait; so delays are exact and cost no time.
"""

from __future__ import annotations

import heapq
import itertools
import select
import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple

from slipstream.load.client import LoadClient, Script
from slipstream.load.poller import Poller, make_poller
from slipstream.load.target import Target

START = 1000.0


class Act(NamedTuple):
    """What the server does some time after a request has arrived."""

    after_s: float
    data: bytes = b""
    closes: bool = False
    resets: bool = False


# From the number of the request, and the number of its connection, to what is answered.
Answer = Callable[[int, int], Sequence[Act]]


class VirtualServer:
    def __init__(self, answer: Answer, poller: Poller | None = None) -> None:
        self.now = START
        self.requests: list[tuple[float, int, bytes]] = []  # time, connection, head and body
        self._answer = answer
        self._real = poller or make_poller()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self._listener.setblocking(False)
        self._connections: list[socket.socket] = []
        self._received: list[bytes] = []
        self._acts: list[tuple[float, int, int, Act]] = []
        self._order = itertools.count()

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    def target(self) -> Target:
        return Target(socket.AF_INET, self._listener.getsockname(), "server:1", "/v1", "key")

    def client(self, bodies: Sequence[bytes], *, streams: int | None = None, due: Sequence[float] = ()) -> LoadClient:
        target = self.target()
        script = Script(bodies, streams, due)
        return LoadClient(target, target.head("chat"), script, timeout_s=60.0, clock=lambda: self.now, poller=self)

    def stop(self) -> None:
        for connection in (self._listener, *self._connections):
            connection.close()

    # What the client uses as a poller.

    def register(self, fd: int, eventmask: int, /) -> None:
        self._real.register(fd, eventmask)

    def modify(self, fd: int, eventmask: int, /) -> None:
        self._real.modify(fd, eventmask)

    def unregister(self, fd: int, /) -> None:
        self._real.unregister(fd)

    def close(self) -> None:
        self._real.close()

    def poll(self, timeout: float, /) -> Sequence[tuple[int, int]]:
        until = self.now + timeout
        while True:
            self._serve()
            if ready := self._real.poll(0):
                return ready
            if not self._acts or self._acts[0][0] > until:
                self.now = until
                return []
            self.now, _, idx, act = heapq.heappop(self._acts)
            self._perform(self._connections[idx], act)

    def _serve(self) -> None:
        """Take in connections and requests; an answer begins when its request is complete."""
        while select.select([self._listener], [], [], 0)[0]:
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            # What is sent is there at once: nothing but the made-up clock waits.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections.append(connection)
            self._received.append(b"")
        for idx, connection in enumerate(self._connections):
            while connection.fileno() >= 0 and select.select([connection], [], [], 0)[0]:
                try:
                    data = connection.recv(1 << 20)
                except OSError:
                    data = b""
                if not data:
                    connection.close()
                    break
                self._received[idx] += data
                self._take_requests(idx)

    def _take_requests(self, idx: int) -> None:
        head, found, rest = self._received[idx].partition(b"\r\n\r\n")
        length = int(head.lower().rpartition(b"content-length: ")[2]) if found else 0
        if found and len(rest) >= length:
            request = head + b"\r\n\r\n" + rest[:length]
            self._received[idx] = rest[length:]
            for act in self._answer(len(self.requests), idx):
                heapq.heappush(self._acts, (self.now + act.after_s, next(self._order), idx, act))
            self.requests.append((self.now, idx, request))

    def _perform(self, connection: socket.socket, act: Act) -> None:
        if connection.fileno() < 0:
            return
        if act.data:
            connection.setblocking(True)
            connection.sendall(act.data)
            connection.setblocking(False)
        if act.resets:
            # Closing with this set sends a reset instead of the usual farewell.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        if act.closes or act.resets:
            connection.close()
