"""Whether ``slipstream bench serve`` measures what a server does: one with known delays, in a process of its own.

Shown: times to the first token and gaps as the command reports them beside the delays the server was given; how long
after the server's send each event was time-stamped; and what reading costs the client beside a loop that does nothing
but read. Exits with 1 where a figure is off.

    python benchmarks/bench_serve_check.py [--streams 1,8,32]
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import json
import multiprocessing
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.load.client import LoadClient, Script
from slipstream.load.target import Target

TOLERANCE_MS = 2.0
ROUNDS = 3  # a check that a busy machine has disturbed is made again
MOST_US_AN_EVENT = 3.0  # of the client beyond reading
FLOOD_STREAMS, FLOOD_EVENTS = 128, 1000


class Delays(NamedTuple):
    first_s: float
    gap_s: float
    num_tokens: int


CHECKED = (Delays(0.050, 0.010, 64), Delays(0.200, 0.033, 32), Delays(0.005, 0.004, 128))


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(delta: dict[str, str], finish_reason: str | None = None, usage: dict[str, int] | None = None) -> bytes:
    choices = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}]
    about: dict[str, Any] = {"id": "chatcmpl-0123456789abcdef", "object": "chat.completion.chunk", "model": "scripted"}
    about |= {"choices": choices} if usage is None else {"choices": [], "usage": usage}
    return chunk(b"data: " + json.dumps(about, separators=(",", ":")).encode() + b"\n\n")


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
ROLE, TOKEN = event({"role": "assistant", "content": ""}), event({"content": " word"})


class Server:
    """Streams tokens on time and remembers when it sent them."""

    def __init__(self, listener: socket.socket, delays: Delays) -> None:
        self._listener, self._delays = listener, delays
        self._epoll = select.epoll()
        self._connections: dict[int, socket.socket] = {}
        self._received: dict[int, bytes] = {}
        self._due: list[tuple[float, int, int, int]] = []  # time, request, token, connection
        self.sent: list[list[float]] = []
        tokens = delays.num_tokens
        usage = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1}
        self._end = event({}, "length") + event({}, usage=usage) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"

    def run(self, control: Connection) -> None:
        for fd in (self._listener.fileno(), control.fileno()):
            self._epoll.register(fd, select.EPOLLIN)
        while True:
            # epoll counts in milliseconds; the last one is spent looking, so that sends are on time.
            wait = max(0.0, self._due[0][0] - time.monotonic() - 0.001) if self._due else -1
            for fd, _ in self._epoll.poll(wait):
                if fd == control.fileno():
                    return
                if fd == self._listener.fileno():
                    self._accept()
                else:
                    self._read(fd)
            while self._due and self._due[0][0] <= time.monotonic():
                self._send(*heapq.heappop(self._due))

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections[connection.fileno()] = connection
        self._received[connection.fileno()] = b""
        self._epoll.register(connection.fileno(), select.EPOLLIN)

    def _read(self, fd: int) -> None:
        data = self._connections[fd].recv(1 << 20)
        now = time.monotonic()
        if not data:
            self._epoll.unregister(fd)
            self._connections.pop(fd).close()
            return
        self._received[fd] += data
        head, found, body = self._received[fd].partition(b"\r\n\r\n")
        if not found or len(body) < int(head.lower().rpartition(b"content-length: ")[2]):
            return
        self._received[fd] = b""
        # The head follows when all requests that have arrived are read: one is not to wait for the heads of others.
        heapq.heappush(self._due, (now, len(self.sent), -1, fd))
        heapq.heappush(self._due, (now + self._delays.first_s, len(self.sent), 0, fd))
        self.sent.append([now])

    def _send(self, due: float, request: int, token: int, fd: int) -> None:
        is_last = token == self._delays.num_tokens - 1
        if fd not in self._connections:
            return
        if token < 0:
            self._connections[fd].sendall(HEAD + ROLE)
            return
        self.sent[request].append(time.monotonic())
        self._connections[fd].sendall(TOKEN + self._end if is_last else TOKEN)
        if not is_last:
            heapq.heappush(self._due, (due + self._delays.gap_s, request, token + 1, fd))


def serve(control: Connection, listener: socket.socket, delays: Delays) -> None:
    server = Server(listener, delays)
    server.run(control)
    control.send(server.sent)


class Running(NamedTuple):
    url: str
    control: Connection

    def stop(self) -> list[list[float]]:
        """When each request arrived and when each of its tokens was sent."""
        self.control.send("stop")
        found: list[list[float]] = self.control.recv()
        return found


@contextmanager
def server(delays: Delays) -> Iterator[Running]:
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=serve, args=(theirs, listener, delays))
    process.start()
    try:
        yield Running(f"http://127.0.0.1:{listener.getsockname()[1]}", ours)
    finally:
        listener.close()
        process.terminate()
        process.join()


def check_command(delays: Delays, streams: int) -> list[str]:
    """The command's own figures against the delays; what is off."""
    with server(delays) as running, tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "slipstream", "bench", "serve", "--url", running.url, "--model", "scripted"]
        command += ["--concurrency", str(streams), "--output-dir", folder, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return [done.stderr.strip()]
    row = json.loads(done.stdout)["rows"][0]
    expected = {"ttft": delays.first_s, "itl": delays.gap_s, "tpot": delays.gap_s}
    expected["e2e"] = delays.first_s + (delays.num_tokens - 1) * delays.gap_s
    figures = {f"{name}_{kind}": row[f"{name}_{kind}_ms"] for name in expected for kind in ("mean", "p50")}
    print(
        f"{streams:4} streams, first {1e3 * delays.first_s:g} ms, gaps {1e3 * delays.gap_s:g} ms: "
        + ", ".join(f"{name} {value:.2f}" for name, value in figures.items())
    )
    wrong = [
        f"{streams} streams: {name} is {value} ms, the server's is {1e3 * expected[name.partition('_')[0]]:g}"
        for name, value in figures.items()
        if abs(value - 1e3 * expected[name.partition("_")[0]]) > TOLERANCE_MS
    ]
    return wrong + ([f"{row['failed']} requests failed"] if row["failed"] else [])


def check_stamps(delays: Delays, streams: int) -> list[str]:
    """How long after the server's send each event was stamped."""
    with server(delays) as running:
        target = Target.parse(running.url)
        client = LoadClient(target, target.head("chat"), Script([b"{}"] * 4 * streams, streams), timeout_s=60.0)
        client.run(time.monotonic())
        sent: NDArray[np.float64] = np.array(running.stop())
    records = client.recorder.records(0.0, {})
    # Streams are told apart by their order: requests and tokens both follow each other in time.
    stamped = np.sort(records.event_times)
    lag = 1e3 * (stamped - np.sort(sent[:, 1:].ravel()))
    median, most = np.percentile(lag, [50, 99])
    print(f"{streams:4} streams: events are stamped {median:.3f} ms after they were sent (p50), {most:.3f} ms (p99)")
    return [f"{streams} streams: p99 of the stamps' lag is {most:.2f} ms"] if most > TOLERANCE_MS else []


class Stopwatch:
    """A poller for the client that sends one event on every connection before it looks, with the clock stopped.

    So every event is read on its own, and no waiting or waking up is in the time: what is left is what limits a client.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._real = select.epoll()
        self._listener = listener
        self._connections: list[socket.socket] = []
        self._num_rounds = 0
        self.spent_s = 0.0
        self.register, self.modify, self.unregister = self._real.register, self._real.modify, self._real.unregister
        self._begin = time.process_time()

    def poll(self, timeout: float, /) -> list[tuple[int, int]]:
        self.spent_s += time.process_time() - self._begin
        if len(self._connections) < FLOOD_STREAMS:
            self._answer_connections()
        else:
            is_last = self._num_rounds == FLOOD_EVENTS
            self._num_rounds += 1
            for connection in self._connections:
                connection.sendall(TOKEN + event({}, "length") + b"0\r\n\r\n" if is_last else TOKEN)
        self._begin = time.process_time()
        return self._real.poll(timeout)

    def close(self) -> None:
        self._real.close()
        for connection in self._connections:
            connection.close()

    def _answer_connections(self) -> None:
        while select.select([self._listener], [], [], 0)[0]:
            connection, _ = self._listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(HEAD + ROLE)
            self._connections.append(connection)


def read_alone(stopwatch: Stopwatch, address: tuple[str, int]) -> None:
    """A loop that reads the same events from as many connections, and does nothing with them."""
    recv = {}
    for _ in range(FLOOD_STREAMS):
        own = socket.create_connection(address)
        own.setblocking(False)
        recv[own.fileno()] = own.recv
        stopwatch.register(own.fileno(), select.EPOLLIN)
    num_left = FLOOD_STREAMS
    while num_left:
        for fd, _ in stopwatch.poll(1.0):
            num_left -= recv[fd](65536).endswith(b"0\r\n\r\n")


def check_cost() -> list[str]:
    """What an event costs the client, and what of it is reading."""
    costs = []
    for is_client in (False, True):
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
            stopwatch = Stopwatch(listener)
            target = Target(listener.family, listener.getsockname(), "scripted", "/v1")
            if is_client:
                script = Script([b"{}"] * FLOOD_STREAMS, FLOOD_STREAMS)
                client = LoadClient(target, target.head("chat"), script, timeout_s=60.0, poller=stopwatch)
                client.run(time.monotonic())
                assert client.recorder.num_ok == FLOOD_STREAMS, client.recorder.failures
            else:
                read_alone(stopwatch, listener.getsockname())
                stopwatch.close()
        costs.append(1e6 * stopwatch.spent_s / (FLOOD_STREAMS * FLOOD_EVENTS))
    reading, whole = costs
    print(
        f"{FLOOD_STREAMS:4} streams, one event a read: {whole:.2f} us of CPU an event, of which a loop that only reads "
        f"takes {reading:.2f}"
    )
    own = whole - reading
    return [f"the client takes {own:.2f} us an event beyond reading"] if own > MOST_US_AN_EVENT else []


def repeated(check: Callable[..., list[str]], *arguments: object) -> list[str]:
    """What is off in every round."""
    found: list[str] = []
    for _ in range(ROUNDS):
        if not (found := check(*arguments)):
            break
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,8,32")
    streams = [int(part) for part in parser.parse_args().streams.split(",")]
    with contextlib.suppress(AttributeError, PermissionError):
        # What else runs on this machine is to delay neither side. Only root may ask for that, on Linux.
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    wrong = [fault for delays in CHECKED for count in streams for fault in repeated(check_command, delays, count)]
    wrong += [fault for count in streams for fault in repeated(check_stamps, CHECKED[0], count)]
    wrong += repeated(check_cost)
    for fault in wrong:
        print(f"off: {fault}", file=sys.stderr)
    print("off" if wrong else f"all within {TOLERANCE_MS:g} ms", f"({os.cpu_count()} cores)")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
