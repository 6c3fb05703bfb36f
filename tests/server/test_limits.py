"""What is refused before any route: keys that are almost right, and clients that take too long or too much."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.server.errors import ApiError
from slipstream.server.front_end_process import open_listener
from slipstream.server.http import connection as connection_module
from slipstream.server.http import listener as listener_module
from slipstream.server.http.exchange import Exchange, HttpRequest
from slipstream.server.http.limits import ConnectionLimits
from slipstream.server.http.listener import Listener
from slipstream.server.keys import check_key

LIMITS = ConnectionLimits(max_connections=100, max_body_bytes=1000, body_timeout_s=10.0)


@pytest.mark.parametrize(
    ("header", "is_right"),
    [
        ("Authorization: Bearer secret", True),
        ("Authorization: bearer secret", True),
        ("Authorization: BEARER  secret", True),
        ("X-API-Key: secret", True),
        ("Authorization: Bearer secret2", False),
        ("Authorization: Bearer secre", False),
        ("Authorization: Bearer s", False),
        ("Authorization: Bearer", False),
        ("Authorization: Bearer ", False),
        ("Authorization: Bearer secret secret", False),
        ("Authorization: Bearer SECRET", False),
        ("Authorization: Basic secret", False),
        ("Authorization: secret", False),
        ("X-API-Key: secret2", False),
        ("X-API-Key: secre", False),
        ("X-API-Key: ", False),
        ("X-API-Key: Bearer secret", False),
        ("X-Other: secret", False),
    ],
)
def test_a_key_is_right_or_wrong_and_never_almost_right(header: str, is_right: bool) -> None:
    name, _, value = header.partition(": ")
    request = HttpRequest(path="/v1/completions", headers=[(name.lower().encode(), value.encode())])
    with contextlib.nullcontext() if is_right else pytest.raises(ApiError, match="a valid API key is needed"):
        check_key(request, b"secret")


def test_either_header_may_hold_the_key() -> None:
    check_key(HttpRequest(headers=[(b"authorization", b"Bearer other"), (b"x-api-key", b"secret")]), b"secret")


class Clock:
    """Time that only the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (connection_module, listener_module):  # the loop's own clock goes on
        monkeypatch.setattr(module, "time", made)
    return made


async def until(condition: Callable[[], bool]) -> None:
    """However long it takes; a test that hangs is ended by its own limit."""
    while not condition():
        await asyncio.sleep(0.005)


class Client:
    """A connection of which a test decides every byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()
        await asyncio.sleep(0.02)  # so that it arrives by itself

    async def status(self) -> int:
        return int((await asyncio.wait_for(self.reader.readline(), 60)).split()[1])

    async def rest(self) -> bytes:
        return await asyncio.wait_for(self.reader.read(), 60)


class Site:
    """A listener whose application answers with the body it was sent."""

    def __init__(self, limits: ConnectionLimits, check: Callable[[HttpRequest], None] = lambda request: None) -> None:
        self.ended: list[tuple[str, int | None]] = []
        self.waiting: list[Exchange] = []
        self.listener = Listener(limits, check, self.handle, self._note)
        self.clients: list[Client] = []

    def handle(self, exchange: Exchange) -> None:
        if exchange.request.path == "/wait":
            self.waiting.append(exchange)
        else:
            exchange.respond(200, exchange.request.body, b"text/plain")

    def _note(self, exchange: Exchange) -> None:
        self.ended.append((exchange.request.path, exchange.status))

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        own = open_listener("127.0.0.1", 0, is_shared=False)
        self.port = own.getsockname()[1]
        await self.listener.listen([own])
        try:
            yield
        finally:
            for client in self.clients:
                client.writer.close()
            self.listener.stop_accepting()
            await self.listener.close(0.1)

    async def client(self) -> Client:
        made = Client(*await asyncio.open_connection("127.0.0.1", self.port))
        self.clients.append(made)
        return made

    async def tick(self) -> None:
        """What the listener does twice a second."""
        assert self.listener._ticking is not None
        self.listener._ticking.cancel()
        self.listener._tick()
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(("num_pieces", "status"), [(3, 200), (100, 408)])
def test_a_byte_now_and_then_does_not_keep_a_body_open(clock: Clock, num_pieces: int, status: int) -> None:
    """No pause is too long, but all together are."""

    async def run() -> int:
        site = Site(LIMITS)
        async with site.open():
            client = await site.client()
            await client.say(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % num_pieces)
            for _ in range(num_pieces):
                clock.now += 0.9 * LIMITS.body_timeout_s
                await site.tick()
                if client.reader._buffer:  # type: ignore[attr-defined]  # it was answered before its end
                    break
                await client.say(b"x")
            return await client.status()

    assert asyncio.run(run()) == status


def test_clients_that_are_slow_stall_no_other(clock: Clock) -> None:
    """Time stands still, so none of them is refused: the one that is answered has not waited for that."""

    async def run() -> None:
        site = Site(LIMITS)
        async with site.open():
            slow = [await site.client() for _ in range(20)]
            for client in slow:
                await client.say(b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\nx")
            quick = await site.client()
            await quick.say(b"POST / HTTP/1.1\r\nContent-Length: 1\r\n\r\nx")
            assert await quick.status() == 200
            for client in slow:
                await client.say(b"y")
                assert await client.status() == 200

    asyncio.run(run())


@pytest.mark.parametrize("said", [b"", b"POST / HT", b"POST / HTTP/1.1\r\nHost: x\r\n", b"\r\n\r\n"])
def test_headers_have_a_time_to_arrive_in(clock: Clock, said: bytes) -> None:
    async def run() -> None:
        site = Site(LIMITS)
        async with site.open():
            client = await site.client()
            await client.say(said)
            clock.now += LIMITS.header_timeout_s - 1
            await site.tick()
            assert site.listener.num_connections == 1
            clock.now += 2
            await site.tick()
            if said:
                assert await client.status() == 408
            await client.rest()  # it is closed

    asyncio.run(run())


def test_a_connection_without_a_request_is_closed_after_a_while(clock: Clock) -> None:
    async def run() -> None:
        site = Site(LIMITS)
        async with site.open():
            client = await site.client()
            await client.say(b"GET / HTTP/1.1\r\n\r\n")
            assert await client.status() == 200
            clock.now += LIMITS.keep_alive_s - 1
            await site.tick()
            assert site.listener.num_connections == 1
            clock.now += 2
            await site.tick()
            await client.rest()
            assert site.listener.num_connections == 0

    asyncio.run(run())


def test_time_at_work_is_not_the_client_s(clock: Clock) -> None:
    async def run() -> None:
        site = Site(LIMITS)
        async with site.open():
            client = await site.client()
            await client.say(b"GET /wait HTTP/1.1\r\n\r\n")
            clock.now += 3600
            await site.tick()
            site.waiting[0].respond(200, b"late", b"text/plain")
            assert await client.status() == 200

    asyncio.run(run())


def test_a_client_that_does_not_read_is_dropped_and_costs_little(clock: Clock) -> None:
    async def run() -> None:
        site = Site(LIMITS)
        async with site.open():
            _, writer = await asyncio.open_connection("127.0.0.1", site.port, limit=1024)
            writer.write(b"GET /wait HTTP/1.1\r\n\r\n")
            while not site.waiting:
                await asyncio.sleep(0.01)
            (exchange,) = site.waiting
            gone: list[bool] = []
            exchange.on_gone = lambda: gone.append(True)
            exchange.start(200, [])
            while exchange.keeps_up:
                exchange.write(b"x" * 65536)
                await asyncio.sleep(0)
            clock.now += LIMITS.write_timeout_s - 1
            await site.tick()
            assert not gone
            for _ in range(3):  # the kernel may have taken some more meanwhile, which looks as if it were read
                clock.now += LIMITS.write_timeout_s + 1
                await site.tick()
            assert gone == [True]
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    asyncio.run(run())


def test_answers_that_are_not_read_do_not_pile_up(clock: Clock) -> None:
    """However many requests a client sends ahead: the next one is looked at when the last answer is on its way."""

    async def run() -> None:
        site = Site(replace(LIMITS, max_body_bytes=1 << 20))
        async with site.open():
            reader, writer = await asyncio.open_connection("127.0.0.1", site.port, limit=1024)
            body = b"x" * 500_000
            request = b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
            sending = asyncio.create_task(_send(writer, 60 * request + b"GET /wait HTTP/1.1\r\n\r\n"))
            await asyncio.sleep(0.5)
            (own,) = site.listener.connections
            assert own.transport.get_write_buffer_size() < 2 * len(body)
            assert len(site.ended) < 60 and not site.waiting
            while not site.waiting:  # it reads after all, and gets everything
                assert await asyncio.wait_for(reader.read(1 << 20), 60)
            await sending
            assert len(site.ended) == 60
            writer.close()

    asyncio.run(run())


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        writer.write(data)
        await writer.drain()


def test_a_client_that_leaves_its_answers_unread_is_dropped(clock: Clock) -> None:
    """Between requests too: a pipelined request does not hold its slot for ever."""

    async def run() -> None:
        site = Site(LIMITS)
        site.listener.handle = lambda exchange: exchange.respond(200, b"x" * 20_000_000, b"text/plain")
        async with site.open():
            _, writer = await asyncio.open_connection("127.0.0.1", site.port, limit=1024)
            writer.write(b"GET / HTTP/1.1\r\n\r\n" * 2)
            await until(lambda: bool(site.ended))
            assert [path for path, _ in site.ended] == ["/"]
            for _ in range(3):
                clock.now += LIMITS.write_timeout_s + 1
                await site.tick()
            assert site.listener.num_connections == 0
            writer.close()

    asyncio.run(run())


@pytest.mark.parametrize("last", [b"Connection: close\r\n", b""])
def test_a_client_that_reads_slowly_gets_all_of_its_answer(clock: Clock, last: bytes) -> None:
    size = 20_000_000

    async def run() -> int:
        site = Site(LIMITS)
        site.listener.handle = lambda exchange: exchange.respond(200, b"x" * size, b"text/plain")
        async with site.open():
            reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
            writer.write(b"GET / HTTP/1.1\r\n" + last + b"\r\n")
            await reader.readuntil(b"\r\n\r\n")
            num_read = 0
            while num_read < size:
                if not (data := await asyncio.wait_for(reader.read(4 << 20), 60)):
                    break
                num_read += len(data)
                clock.now += 0.9 * LIMITS.write_timeout_s / 10
                await site.tick()
            writer.close()
            return num_read

    assert asyncio.run(run()) == size


def test_whoever_waits_longest_makes_room() -> None:
    """At the limit a new client is served; one whose request is being answered keeps its slot."""

    async def run() -> None:
        site = Site(replace(LIMITS, max_connections=4))
        async with site.open():
            working = await site.client()
            await working.say(b"GET /wait HTTP/1.1\r\n\r\n")
            silent = [await site.client() for _ in range(3)]
            await asyncio.sleep(0.05)
            for i in range(5):
                late = await site.client()
                await late.say(b"GET /%d HTTP/1.1\r\n\r\n" % i)
                assert await late.status() == 200
                assert site.listener.num_connections <= 4
            for client in silent:
                with contextlib.suppress(ConnectionError):
                    assert await client.rest() == b"", "they are closed without a word"
            site.waiting[0].respond(200, b"done", b"text/plain")
            assert await working.status() == 200

    asyncio.run(run())


def test_a_crowd_at_the_door_takes_no_more_descriptors_than_there_are() -> None:
    """However many come at once: they are let in a few at a time."""

    async def run() -> None:
        site = Site(replace(LIMITS, max_connections=4))
        async with site.open():
            with contextlib.ExitStack() as opened:
                for _ in range(300):
                    opened.enter_context(socket.create_connection(("127.0.0.1", site.port)))
                before = count_descriptors()
                most = 0
                for _ in range(200):
                    await asyncio.sleep(0)
                    most = max(most, count_descriptors() - before)
                assert 4 <= most <= 4 + listener_module._ACCEPTED_A_TURN
                client = await site.client()
                await client.say(b"GET / HTTP/1.1\r\n\r\n")
                assert await client.status() == 200
                assert site.listener.num_connections <= 4
            await until(lambda: site.listener._num_descriptors == site.listener.num_connections)

    asyncio.run(run())


def count_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class Door(socket.socket):
    """The system gives no descriptor a few times."""

    num_asked = 0

    def accept(self) -> tuple[socket.socket, Any]:
        self.num_asked += 1
        if self.num_asked <= 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_without_a_descriptor_the_door_is_closed_for_a_moment(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        site = Site(LIMITS)
        own = Door(socket.AF_INET, socket.SOCK_STREAM)
        own.bind(("127.0.0.1", 0))
        site.port = own.getsockname()[1]
        await site.listener.listen([own])
        client = await site.client()
        await client.say(b"GET / HTTP/1.1\r\n\r\n")
        assert await client.status() == 200
        client.writer.close()
        site.listener.stop_accepting()
        await site.listener.close(0.1)
        assert 4 <= own.num_asked < 10

    asyncio.run(run())
    assert len(caplog.records) == 1 and "Too many open files" in caplog.text


def test_when_all_are_at_work_the_new_one_goes() -> None:
    async def run() -> None:
        site = Site(replace(LIMITS, max_connections=2))
        async with site.open():
            for _ in range(2):
                client = await site.client()
                await client.say(b"GET /wait HTTP/1.1\r\n\r\n")
            late = await site.client()
            with contextlib.suppress(ConnectionError):
                assert await late.rest() == b""
            for exchange in site.waiting:
                exchange.respond(200, b"", b"text/plain")
            assert [await client.status() for client in site.clients[:2]] == [200, 200]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"POST / HTTP/1.1\r\nContent-Length: 1001\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3e9\r\n" + b"x" * 1001 + b"\r\n0\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nA: " + b"x" * 200_000, 431),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"x" * 200_000, 431),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\nx", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: +1\r\n\r\nx", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0x1\r\nx\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\nContent-Length: 1\n\nx", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nA: " + b"x" * 70_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 300 + b"\r\n", 431),
        (b"GET /" + b"x" * 70_000, 431),
        (b"garbage\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n folded: x\r\n\r\n", 400),
        (b"CONNECT x:1 HTTP/1.1\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00", 400),
    ],
)
def test_what_is_too_large_or_no_http_gets_one_line(request_bytes: bytes, status: int) -> None:
    async def run() -> None:
        site = Site(LIMITS)
        async with site.open():
            client = await site.client()
            await client.say(request_bytes)
            assert await client.status() == status
            head, _, body = (await client.rest()).partition(b"\r\n\r\n")
            assert b"connection: close" in head
            assert json.loads(body)["error"]["code"] == status
        assert site.ended[0][1] == status
        assert site.listener.num_buffered_bytes == 0

    asyncio.run(run())


def test_a_stranger_s_body_is_not_read() -> None:
    def check(request: HttpRequest) -> None:
        raise ApiError(401, "who are you?")

    async def run() -> None:
        site = Site(LIMITS, check)
        async with site.open():
            client = await site.client()
            await client.say(b"POST / HTTP/1.1\r\nContent-Length: 900\r\n\r\n")
            assert await client.status() == 401

    asyncio.run(run())


def test_all_bodies_together_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "_SMALL_BODY", 0)

    async def run() -> None:
        site = Site(replace(LIMITS, max_body_bytes=100))
        async with site.open():
            senders = [await site.client() for _ in range(66)]
            for client in senders:
                await client.say(b"POST / HTTP/1.1\r\nContent-Length: 100\r\n\r\n" + b"x" * 99)
            refused = [client for client in senders if client.reader._buffer]  # type: ignore[attr-defined]
            assert len(refused) == 2
            assert await refused[0].status() == 503
            for client in senders[:64]:
                await client.say(b"x")
                assert await client.status() == 200
        assert site.listener.num_buffered_bytes == 0

    asyncio.run(run())


def test_small_bodies_have_their_room_whatever_others_send() -> None:
    async def run() -> None:
        site = Site(replace(LIMITS, max_body_bytes=100_000))
        async with site.open():
            for _ in range(64):
                client = await site.client()
                client.writer.write(b"POST / HTTP/1.1\r\nContent-Length: 100000\r\n\r\n" + b"x" * 99_999)
            while site.listener.num_buffered_bytes < 64 * 99_999:
                await asyncio.sleep(0.01)
            small = await site.client()
            await small.say(b"POST / HTTP/1.1\r\nContent-Length: 500\r\n\r\n" + b"x" * 500)
            assert await small.status() == 200

    asyncio.run(run())


def test_bodies_that_wait_to_be_read_are_counted() -> None:
    async def run() -> None:
        site = Site(LIMITS)
        async with site.open():
            request = b"POST /wait HTTP/1.1\r\nContent-Length: 900\r\n\r\n" + b"x" * 900
            first, second, third = [await site.client() for _ in range(3)]
            for client in (first, second, third):
                await client.say(request)
            await third.say(request)  # after the first, and not parsed yet
            assert site.listener.num_buffered_bytes == 3 * 900
            site.waiting[0].drop_body()
            assert site.listener.num_buffered_bytes == 2 * 900
            site.waiting[0].respond(200, b"", b"text/plain")
            site.waiting[1].respond(200, b"", b"text/plain")
            assert site.listener.num_buffered_bytes == 900
            third.writer.close()
            await until(lambda: site.listener.num_buffered_bytes == 0)

    asyncio.run(run())


@pytest.mark.parametrize("at", [30, 90, 120])
def test_a_request_that_comes_in_two_parts_behind_another(at: int) -> None:
    """Its body is one, whatever the first part held, and has the time of one."""
    body = b"x" * 200_000
    head = b"POST / HTTP/1.1\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body)
    requests = b"GET / HTTP/1.1\r\n\r\n" + head + body

    async def run() -> bytes:
        site = Site(replace(LIMITS, max_body_bytes=1 << 20))
        async with site.open():
            client = await site.client()
            await client.say(requests[:at])
            await client.say(requests[at:])
            return await client.rest()

    answer = asyncio.run(run())
    assert answer.count(b"HTTP/1.1 200 OK") == 2 and answer.endswith(b"\r\n\r\n" + body)


def test_the_time_of_a_request_behind_another(clock: Clock) -> None:
    async def run() -> None:
        site = Site(replace(LIMITS, body_timeout_s=30.0))
        async with site.open():
            client = await site.client()
            await client.say(b"GET /wait HTTP/1.1\r\n\r\nPOST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nx")
            clock.now += 3600  # the server's own
            await site.tick()
            site.waiting[0].respond(200, b"", b"text/plain")
            for _ in range(2):
                clock.now += LIMITS.header_timeout_s + 1
                await site.tick()
                await client.say(b"x")
            assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
            assert await client.status() == 200

    asyncio.run(run())


def test_what_follows_a_body_is_no_header() -> None:
    """A proxy may have looked at the headers only."""
    asked: list[HttpRequest] = []

    async def run() -> None:
        site = Site(LIMITS)

        def handle(exchange: Exchange) -> None:
            asked.append(exchange.request)
            exchange.respond(200, b"", b"text/plain")

        site.listener.handle = handle
        async with site.open():
            client = await site.client()
            await client.say(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
            await client.say(b"1\r\nx\r\n0\r\nX-Request-Id: a\r\n\r\n")
            assert await client.status() == 200

    asyncio.run(run())
    assert asked[0].body == b"x" and asked[0].header(b"x-request-id") is None


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_requests_ahead_of_their_turn_are_answered_in_order(size: int) -> None:
    requests = b"".join(b"POST /%d HTTP/1.1\r\nContent-Length: 2\r\n\r\n%02d" % (i, i) for i in range(20))

    async def run() -> None:
        site = Site(LIMITS)
        async with site.open():
            client = await site.client()
            for start in range(0, len(requests), size):
                client.writer.write(requests[start : start + size])
                if size < 100:
                    await asyncio.sleep(0)
            await client.say(b"GET /end HTTP/1.1\r\nConnection: close\r\n\r\n")
            answers = (await client.rest()).split(b"HTTP/1.1 200 OK")[1:]
        bodies = [answer.partition(b"\r\n\r\n")[2] for answer in answers]
        assert bodies == [b"%02d" % i for i in range(20)] + [b""]

    asyncio.run(run())


def test_a_client_that_leaves_while_it_waits_is_noticed() -> None:
    async def run() -> None:
        site = Site(LIMITS)
        async with site.open():
            client = await site.client()
            await client.say(b"GET /wait HTTP/1.1\r\n\r\n")
            gone: list[bool] = []
            site.waiting[0].on_gone = lambda: gone.append(True)
            client.writer.close()
            await until(lambda: bool(gone))
            assert gone == [True] and not site.waiting[0].is_open
            site.waiting[0].respond(200, b"late", b"text/plain")  # harmless
            assert site.ended == [("/wait", None)]

    asyncio.run(run())


def test_what_old_and_odd_clients_get() -> None:
    async def ask(site: Site, request: bytes) -> bytes:
        client = await site.client()
        await client.say(request)
        client.writer.write_eof()
        return await client.rest()

    async def run() -> None:
        site = Site(LIMITS)
        async with site.open():
            old = await ask(site, b"GET / HTTP/1.0\r\n\r\n")
            assert old.startswith(b"HTTP/1.1 200 OK") and b"connection: close" in old
            head = await ask(site, b"HEAD / HTTP/1.1\r\nConnection: close\r\n\r\n")
            assert head.endswith(b"\r\n\r\n") and b"content-length: 0" in head
            upgrade = b"GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
            assert (await ask(site, upgrade)).startswith(b"HTTP/1.1 200 OK")
            client = await site.client()
            await client.say(b"POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
            assert await client.status() == 100
            await client.reader.readline()
            await client.say(b"ok")
            assert await client.status() == 200

    asyncio.run(run())


def test_every_answer_leaves_at_once() -> None:
    """Nagle's algorithm holds small writes back for 40 ms."""

    async def run() -> None:
        site = Site(LIMITS)
        async with site.open():
            await site.client()
            await until(lambda: site.listener.num_connections == 1)
            (own,) = site.listener.connections
            found = own.transport.get_extra_info("socket")
            assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    asyncio.run(run())
