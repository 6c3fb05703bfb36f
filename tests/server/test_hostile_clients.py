"""Clients that would take a server down; ``benchmarks/hostile_clients.py`` sends more of each, and times the others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from hostile_clients import Target, send_broken, send_large

from .conftest import MODEL_NAME, RunningServer, start_server

BODY = {"model": MODEL_NAME, "prompt": "x", "max_tokens": 2, "ignore_eos": True}
DESCRIPTORS = 128


@pytest.fixture(scope="module")
def narrow(model_folder: Path) -> Iterator[RunningServer]:
    """A server with few descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, hard))
    try:
        running = start_server(model_folder, "--max-connections", str(DESCRIPTORS - 64), "--header-timeout-s", "3600")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    # The server has taken as many as the system gives; from now on these are all.
    resource.prlimit(running.process.pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    yield running
    running.stop()


def target_of(server: RunningServer) -> Target:
    parts = urlsplit(server.url)
    return Target(parts.hostname or "", parts.port or 0)


def num_descriptors(server: RunningServer) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


def test_half_open_connections_keep_no_client_out(narrow: RunningServer) -> None:
    parts = urlsplit(narrow.url)
    num_lines = len(narrow.lines)
    with contextlib.ExitStack() as opened:
        for i in range(3 * DESCRIPTORS):
            own = opened.enter_context(socket.create_connection((parts.hostname or "", parts.port or 0), timeout=60))
            with contextlib.suppress(ConnectionError):
                own.sendall([b"", b"GET /health HT", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"][i % 3])
            if i % 64 == 63:
                answer = httpx.post(f"{narrow.url}/v1/completions", json=BODY, timeout=60)
                assert answer.status_code == 200
        assert num_descriptors(narrow) < DESCRIPTORS
    assert len(narrow.lines) - num_lines < 50, "connections that say nothing are not worth a line each"


def test_a_crowd_that_comes_at_once(narrow: RunningServer) -> None:
    """More than there are descriptors, in one turn of the server's loop."""
    parts = urlsplit(narrow.url)
    num_lines = len(narrow.lines)
    with contextlib.ExitStack() as opened:
        os.kill(narrow.process.pid, signal.SIGSTOP)
        try:
            for _ in range(4 * DESCRIPTORS):
                opened.enter_context(socket.create_connection((parts.hostname or "", parts.port or 0), timeout=60))
        finally:
            os.kill(narrow.process.pid, signal.SIGCONT)
        assert httpx.get(f"{narrow.url}/health", timeout=60).status_code == 200
    assert len(narrow.lines) - num_lines < 50


@pytest.mark.parametrize(
    "num_requests", [300, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_broken_requests(narrow: RunningServer, num_requests: int) -> None:
    httpx.get(f"{narrow.url}/health")
    before = num_descriptors(narrow)
    outcome = asyncio.run(send_broken(target_of(narrow), num_requests))
    assert not outcome.faults
    assert outcome.statuses[400] > num_requests / 4 and outcome.statuses[200] + outcome.statuses[405] > 0
    narrow.wait_until_idle()
    deadline = time.monotonic() + 60
    while num_descriptors(narrow) > before + 2:
        assert time.monotonic() < deadline, "descriptors were leaked"
        time.sleep(0.1)
    assert httpx.post(f"{narrow.url}/v1/completions", json=BODY, timeout=60).status_code == 200


def test_large_lists_are_refused_before_anything_is_made_of_them(narrow: RunningServer) -> None:
    assert asyncio.run(send_large(target_of(narrow), 2, 3_000_000)) == [400, 400]
    for field, value in {
        "stop": ["x"] * 100_000,
        "bad_words": ["x"] * 100_000,
        "logit_bias": {str(i): 1 for i in range(100_000)},
        "stop_token_ids": [1] * 100_000,
    }.items():
        answer = httpx.post(f"{narrow.url}/v1/completions", json={**BODY, field: value}, timeout=60)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == field, answer.text
    chat = f"{narrow.url}/v1/chat/completions"
    messages = [{"role": "user", "content": "x"}]
    tools = [{"type": "function", "function": {"name": "f"}}] * 10_000
    for field, body in {
        "messages": {"messages": messages * 50_000},
        "tools": {"messages": messages, "tools": tools},
    }.items():
        answer = httpx.post(chat, json=body, timeout=60)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == field, answer.text
