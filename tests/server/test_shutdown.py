"""The end of a server, without an engine: clients that do not read, and requests that come too late."""

from __future__ import annotations

import asyncio
import logging
import socket
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.types import Receive, Scope, Send

from slipstream.server.app import Server
from slipstream.server.errors import ApiError
from slipstream.server.generation import Gate, Generation
from slipstream.server.run import GracefulServer
from slipstream.types import SamplingParams


def without_engine(shutdown_timeout_s: float = 0.0) -> Server:
    client = SimpleNamespace(
        config=SimpleNamespace(scheduler=SimpleNamespace(max_num_seqs=4)),
        close=lambda: None,
        prepare=lambda *_: SimpleNamespace(requests=[None, None, None]),
    )
    gate = Gate(cast(Any, client), cast(Any, None), max_queue=4)
    return cast(
        Server,
        SimpleNamespace(gate=gate, settings=SimpleNamespace(shutdown_timeout_s=shutdown_timeout_s), client=client),
    )


def prepare(server: Server) -> Generation:
    return asyncio.run(server.gate.prepare(["x"], SamplingParams(n=3), "id", 0))


@pytest.mark.parametrize("is_forced", [False, True], ids=["time is up", "a second signal"])
def test_a_client_that_does_not_read_holds_nothing_up(
    is_forced: bool, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is told by a closed connection alone; what it had asked for counts as aborted, and nobody reads a trace."""
    caplog.set_level(logging.INFO)
    server = without_engine(30.0 if is_forced else 0.0)
    is_stuck = asyncio.Event()

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        await server.gate.prepare(["x"], SamplingParams(n=3), "id", 0)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            sending = asyncio.ensure_future(
                send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            )
            done, _ = await asyncio.wait([sending], timeout=0.5)
            if not done:
                is_stuck.set()
            await sending

    async def serve_and_end() -> float:
        listener = socket.create_server(("127.0.0.1", 0))
        running = GracefulServer(server, endless)
        serving = asyncio.ensure_future(running.serve(sockets=[listener]))
        _, writer = await asyncio.open_connection(*listener.getsockname(), limit=1024)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await is_stuck.wait()
        running.should_exit, running.force_exit = True, is_forced
        start = asyncio.get_running_loop().time()
        await serving
        writer.close()
        return asyncio.get_running_loop().time() - start

    assert asyncio.run(serve_and_end()) < 10
    assert f"shutting down: 3 requests have {30 if is_forced else 0} s to finish" in caplog.text
    assert "shut down: 0 requests finished, 3 aborted" in caplog.text
    assert "Traceback" not in capfd.readouterr().err


def test_a_request_that_comes_too_late_is_refused() -> None:
    server = without_engine()
    early = prepare(server)
    server.gate.close()
    with pytest.raises(ApiError, match="the server is shutting down") as refused:
        prepare(server)
    assert refused.value.status == 503

    async def start() -> None:
        async with server.gate.run(early, every_token=True):
            pytest.fail("started in a server that ends")

    with pytest.raises(ApiError, match="the server is shutting down"):
        asyncio.run(start())
    assert server.gate.num_open == 0
    assert server.gate.num_aborted == 3
