"""The engine's process dies: clients know at once, the server recovers. The server ends: no answer is lost."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from .conftest import MODEL_NAME, RunningServer, start_server

LONG = {"model": MODEL_NAME, "prompt": "x", "max_tokens": 480, "ignore_eos": True, "temperature": 0}

# Far more than is done before a test that sees its first token can hold the engine.
BUSY = {**LONG, "prompt": ["x"] * 4, "n": 16}
NUM_BUSY = 4 * 16


@pytest.fixture
def own_server(model_folder: Path) -> Iterator[RunningServer]:
    running = start_server(model_folder, "--shutdown-timeout-s", "5")
    yield running
    running.stop()


def test_killing_the_engine_in_mid_stream(own_server: RunningServer) -> None:
    url = f"{own_server.url}/v1/completions"
    with (
        ThreadPoolExecutor(1) as pool,
        httpx.stream("POST", url, json={**BUSY, "stream": True}, timeout=60) as answer,
    ):
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        os.kill(own_server.engine_pid, signal.SIGSTOP)  # nothing comes to its end before the kill
        whole = pool.submit(httpx.post, url, json={**LONG, "n": 8}, timeout=60)
        own_server.wait_until_open(NUM_BUSY + 8)
        os.kill(own_server.engine_pid, signal.SIGKILL)
        last = [line for line in lines if line.startswith("data: ")][-1]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["code"] == 503
    assert "the engine process ended with code -9" in error["message"]
    assert whole.result().status_code == 503
    assert whole.result().headers["retry-after"]

    # While it is away, requests are refused at once; then it is back.
    refused = httpx.post(url, json={**LONG, "max_tokens": 2}, timeout=60)
    assert refused.status_code in (503, 200)
    wait_until_well(own_server)
    assert httpx.post(url, json={**LONG, "max_tokens": 2}, timeout=60).status_code == 200
    assert own_server.metric("engine_restarts_total") == 1
    own_server.wait_until_idle()
    own_server.wait_for_line("the engine is back")
    before = own_server.lines[: next(i for i, line in enumerate(own_server.lines) if "the engine is back" in line)]
    told = [json.loads(line) for line in before if line.startswith("{")]
    ended = [line["status"] for line in told if line["path"] == "/v1/completions"]
    assert ended[:2] == [503, 503], "clients do not wait for the next engine to know of the last one's end"


def wait_until_well(server: RunningServer) -> None:
    deadline = time.monotonic() + 60
    while httpx.get(f"{server.url}/health").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_requests_around_the_moment_of_death(own_server: RunningServer) -> None:
    """A process that is dead and not yet missed receives nothing; sending to it must not block."""
    url = own_server.url
    short = {**LONG, "max_tokens": 2}
    for pause_s in (0.0, 0.01, 0.03):
        os.kill(own_server.engine_pid, signal.SIGKILL)
        time.sleep(pause_s)
        assert httpx.post(f"{url}/v1/completions", json=short, timeout=60).status_code == 503
        streamed = httpx.post(f"{url}/v1/completions", json={**short, "stream": True}, timeout=60)
        assert streamed.status_code == 503, "an error before the first event is an ordinary one"
        assert streamed.headers["retry-after"]
        chat = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        assert httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=60).status_code == 503
        assert httpx.get(f"{url}/health", timeout=60).status_code == 503
        wait_until_well(own_server)
    assert own_server.metric("engine_restarts_total") == 3
    assert httpx.post(f"{url}/v1/completions", json=short, timeout=30).status_code == 200


def test_a_shutdown_while_the_engine_is_away(own_server: RunningServer) -> None:
    os.kill(own_server.engine_pid, signal.SIGKILL)
    time.sleep(0.3)
    own_server.process.send_signal(signal.SIGTERM)
    own_server.process.wait(60)


def test_a_shutdown_lets_requests_finish(own_server: RunningServer) -> None:
    with httpx.stream("POST", f"{own_server.url}/v1/completions", json={**LONG, "stream": True}, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        engine_pid = own_server.engine_pid
        own_server.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]"
    own_server.process.wait(60)
    assert "1 requests finished, 0 aborted" in own_server.wait_for_line("shut down:")
    assert not Path(f"/proc/{engine_pid}").exists()


@pytest.fixture
def hasty_server(model_folder: Path) -> Iterator[RunningServer]:
    running = start_server(model_folder, "--shutdown-timeout-s", "0")
    yield running
    running.stop()


def test_a_shutdown_that_takes_too_long_aborts_and_says_so(hasty_server: RunningServer) -> None:
    url = f"{hasty_server.url}/v1/completions"
    with (
        ThreadPoolExecutor(1) as pool,
        httpx.stream("POST", url, json={**BUSY, "stream": True}, timeout=60) as answer,
    ):
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        with hasty_server.engine_at_rest():  # nothing comes to its end by itself
            whole = pool.submit(httpx.post, url, json={**LONG, "n": 8}, timeout=60)
            hasty_server.wait_until_open(NUM_BUSY + 8)
            hasty_server.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line.startswith("data: ")]
            refused = whole.result()
    error = {"message": "the server is shutting down", "type": "server_error", "param": None, "code": 503}
    assert json.loads(rest[-1].removeprefix("data: ")) == {"error": error}
    assert refused.status_code == 503
    assert refused.json() == {"error": error}
    hasty_server.process.wait(60)
    assert f"0 requests finished, {NUM_BUSY + 8} aborted" in hasty_server.wait_for_line("shut down:")
