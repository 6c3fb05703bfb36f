"""The end of a server: clients that do not read, and requests that come too late."""

from __future__ import annotations

import asyncio
import json
import logging
import re

import pytest

from slipstream.engine.client import EngineClient
from slipstream.output import TokenUpdate, TokenUpdates
from slipstream.request import Request
from slipstream.server.front_end import FrontEnd
from slipstream.server.front_end_process import open_listener
from slipstream.server.settings import ServerSettings
from slipstream.text.tokenizer import Tokenizer

from .scripted import ScriptedEngine

STREAM = {"prompt": "x", "n": 3, "stream": True, "max_tokens": 100}


class Endless(ScriptedEngine):
    """Says as much as it is told to, and never comes to an end."""

    def add(self, request: Request) -> None:
        self.requests.append(request)

    def say(self, num_tokens: int) -> None:
        updates = [TokenUpdate(request.request_id, [70] * num_tokens) for request in self.requests]
        self.deliver(TokenUpdates.from_list(updates))


def make(tokenizer: Tokenizer, shutdown_timeout_s: float) -> tuple[FrontEnd, Endless]:
    client = EngineClient(lambda deliver: Endless(deliver, tokenizer, [], {}), in_line=True)
    settings = ServerSettings(shutdown_timeout_s=shutdown_timeout_s, log_requests=False)
    assert isinstance(client.running, Endless)
    return FrontEnd(client, "tiny", settings), client.running


def request_bytes(body: dict[str, object]) -> bytes:
    raw = json.dumps(body).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(raw), raw)


@pytest.mark.parametrize("is_forced", [False, True], ids=["time is up", "a second signal"])
def test_a_client_that_does_not_read_holds_nothing_up(
    tokenizer: Tokenizer, is_forced: bool, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """A closed connection is all it is told; what it had asked for counts as aborted, and nothing is traced."""
    caplog.set_level(logging.INFO)
    front_end, engine = make(tokenizer, 3600.0 if is_forced else 0.0)

    async def serve_and_end() -> None:
        listener = open_listener("127.0.0.1", 0, is_shared=False)
        await front_end.start([listener])
        _, writer = await asyncio.open_connection(*listener.getsockname(), limit=1024)
        writer.write(request_bytes(STREAM))
        while not engine.requests:
            await asyncio.sleep(0.01)
        (connection,) = front_end.listener.connections
        while connection.can_write:
            engine.say(10_000)
            await asyncio.sleep(0)
        await front_end.shut_down(lambda: is_forced)
        assert connection.is_lost, "it was not waited for"
        writer.close()

    asyncio.run(serve_and_end())
    assert f"shutting down: 3 requests have {3600 if is_forced else 0} s to finish" in caplog.text
    assert "shut down: 0 requests finished, 3 aborted" in caplog.text
    assert "Traceback" not in capfd.readouterr().err


def test_a_client_that_falls_behind_gets_the_rest_in_one_piece(tokenizer: Tokenizer) -> None:
    """What waits for it is its text, not an event for each token; nothing of it is lost."""
    front_end, engine = make(tokenizer, 0.0)

    async def run() -> tuple[int, str]:
        listener = open_listener("127.0.0.1", 0, is_shared=False)
        await front_end.start([listener])
        reader, writer = await asyncio.open_connection(*listener.getsockname(), limit=1024)
        writer.write(request_bytes({**STREAM, "n": 1, "max_tokens": 2**30}))
        while not engine.requests:
            await asyncio.sleep(0.01)
        (connection,) = front_end.listener.connections
        num_said = 0
        while connection.can_write:
            engine.say(10_000)
            num_said += 10_000
            await asyncio.sleep(0)
        buffered = connection.transport.get_write_buffer_size()
        for _ in range(500):
            engine.say(10)
            num_said += 10
            await asyncio.sleep(0)
        assert connection.transport.get_write_buffer_size() == buffered, "news of a slow client is not queued as bytes"
        engine.deliver(TokenUpdates.from_list([TokenUpdate(engine.requests[0].request_id, [], "length")]))
        answer = b""
        while not answer.endswith(b"0\r\n\r\n"):
            answer += await asyncio.wait_for(reader.read(1 << 20), 60)
        found = [json.loads(event) for event in re.findall(rb"data: (\{.*?\})\n\n", answer)]
        text = "".join(event["choices"][0]["text"] for event in found)
        assert len(text) == num_said
        writer.close()
        await front_end.shut_down(lambda: True)
        return len(found), text

    events, text = asyncio.run(run())
    assert set(text) == {tokenizer.decode([70])}
    assert events < 500


def test_a_request_that_comes_too_late_is_refused(tokenizer: Tokenizer) -> None:
    front_end, engine = make(tokenizer, 0.0)
    front_end.gate.is_closed = True

    async def run() -> bytes:
        listener = open_listener("127.0.0.1", 0, is_shared=False)
        await front_end.start([listener])
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(request_bytes(STREAM))
        head = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        await front_end.shut_down(lambda: True)
        return head

    head = asyncio.run(run())
    assert b"503" in head and b"retry-after: 5" in head
    assert not engine.requests and front_end.gate.num_open == 0
