"""Several processes that speak HTTP on one port for one engine: what they share, and the death of one of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from .conftest import MODEL_NAME, RunningServer, start_server

SHORT = {"model": MODEL_NAME, "prompt": "x", "max_tokens": 2, "ignore_eos": True}
LONG: dict[str, Any] = {**SHORT, "max_tokens": 400, "temperature": 0}
NUM = 2


@pytest.fixture(scope="module")
def several(model_folder: Path) -> Iterator[RunningServer]:
    options = ("--api-server-count", str(NUM), "--max-queue", "8", "--shutdown-timeout-s", "10", "--seed", "1")
    running = start_server(model_folder, *options)
    yield running
    running.stop()


def front_end_pids(server: RunningServer) -> list[int]:
    tasks = Path(f"/proc/{server.process.pid}/task").glob("*/children")
    children = [int(pid) for task in tasks for pid in task.read_text().split()]
    found = []
    for pid in children:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if b"front_end_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def front_end_of(answer_id: str) -> int:
    return int(answer_id.split("-")[2], 16)


@contextlib.contextmanager
def client_of_each(server: RunningServer) -> Iterator[dict[int, httpx.Client]]:
    """A connection to every front end. The kernel chooses, so it is asked until all are met."""
    found: dict[int, httpx.Client] = {}
    deadline = time.monotonic() + 60
    try:
        while len(found) < NUM:
            assert time.monotonic() < deadline, "a front end gets no connections"
            client = httpx.Client(base_url=server.url, timeout=60)
            with contextlib.suppress(httpx.TransportError):
                answer = client.post("/v1/completions", json=SHORT).json()
                if found.setdefault(front_end_of(answer["id"]), client) is client:
                    continue
            client.close()
        yield found
    finally:
        for client in found.values():
            client.close()


def test_ids_seeds_and_figures(several: RunningServer) -> None:
    before = several.metric("tokens_out_total")
    with client_of_each(several) as clients:
        drawn = {**SHORT, "max_tokens": 20, "temperature": 1.0}
        answers = [client.post("/v1/completions", json=drawn).json() for client in clients.values() for _ in range(3)]
        assert len({answer["id"] for answer in answers}) == len(answers)
        assert len({answer["choices"][0]["text"] for answer in answers}) == len(answers), "seeds of their own"
        asked = {**LONG, "max_tokens": 30}
        texts = {client.post("/v1/completions", json=asked).json()["choices"][0]["text"] for client in clients.values()}
        assert len(texts) == 1, "the same request has the same answer wherever it is asked"
        own = [client.get("/metrics").text for client in clients.values()]
    counted = [
        next(line for line in text.splitlines() if line.startswith("slipstream_completions_total")) for text in own
    ]
    assert counted[0] == counted[1], "whichever is asked, it answers for all"
    deadline = time.monotonic() + 60
    while several.metric("tokens_out_total") < before + 6 * 20 + 2 * 30:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_one_queue_for_all(several: RunningServer) -> None:
    """8 rows and a queue of 8: the 17th is refused wherever it is asked."""
    with client_of_each(several) as clients, several.engine_at_rest(), ThreadPoolExecutor(16) as pool:
        first, second = clients.values()
        waiting = [pool.submit(httpx.post, f"{several.url}/v1/completions", json=SHORT, timeout=60) for _ in range(16)]
        several.wait_until_open(16)
        for client in (first, second):
            answer = client.post("/v1/completions", json=SHORT)
            assert answer.status_code == 429
            assert answer.json()["error"]["message"].startswith("16 requests are waiting or running, 16 are allowed")
        os.kill(several.engine_pid, signal.SIGCONT)
        assert {done.result().status_code for done in waiting} == {200}
    several.wait_until_idle()


def read_stream(client: httpx.Client, body: dict[str, Any]) -> list[str]:
    with client.stream("POST", "/v1/completions", json=body) as answer:
        return [line for line in answer.iter_lines() if line]


def test_a_front_end_dies(several: RunningServer) -> None:
    """Its streams break off and the engine stops computing them; those of the other go on; another one takes over."""
    body: dict[str, Any] = {**LONG, "stream": True}
    with client_of_each(several) as clients, ThreadPoolExecutor(1) as pool:
        several.wait_until_idle()
        num_tokens = several.metric("tokens_out_total")
        with clients[0].stream("POST", "/v1/completions", json={**body, "n": 8}) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            with several.engine_at_rest():  # nothing comes to its end by itself
                other = pool.submit(read_stream, clients[1], body)
                several.wait_until_open(8 + 1)
                pids = front_end_pids(several)
                assert len(pids) == NUM
                os.kill(pids[0], signal.SIGKILL)
                several.wait_for_line("front end 0 ended with code -9")
                several.wait_until_open(1)
            with pytest.raises(httpx.TransportError):
                list(lines)
        assert other.result()[-1] == "data: [DONE]"
    several.wait_until_idle()  # no page is held for requests without a reader
    while (produced := several.metric("tokens_out_total") - num_tokens) <= LONG["max_tokens"]:
        time.sleep(0.05)  # the one that was asked may not have the last figures yet
    assert produced < (8 + 1) * LONG["max_tokens"], "nor are they computed to their end"
    deadline = time.monotonic() + 60
    while len(front_end_pids(several)) < NUM:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    with client_of_each(several) as clients:
        assert set(clients) == {0, 1}


def test_the_engine_dies(several: RunningServer) -> None:
    with client_of_each(several) as clients:
        os.kill(several.engine_pid, signal.SIGKILL)
        for client in clients.values():
            assert client.post("/v1/completions", json=SHORT).status_code == 503
        deadline = time.monotonic() + 60
        while not all(client.get("/health").status_code == 200 for client in clients.values()):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        for client in clients.values():
            assert client.post("/v1/completions", json=SHORT).status_code == 200
            assert "slipstream_engine_restarts_total 1.0" in client.get("/metrics").text


def test_a_port_of_another_server_is_not_shared(several: RunningServer, model_folder: Path) -> None:
    """Its clients would be answered by either."""
    port = str(urlsplit(several.url).port)
    command = [sys.executable, "-m", "slipstream", "serve", str(model_folder), "--port", port]
    command += ["--api-server-count", str(NUM)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 2
    assert ran.stderr.strip().startswith(f"error: cannot listen on 127.0.0.1 port {port}")


def test_the_end_of_all_lets_requests_finish(model_folder: Path) -> None:
    running = start_server(model_folder, "--api-server-count", str(NUM))
    try:
        with client_of_each(running) as clients, contextlib.ExitStack() as streams:
            lines = []
            for client in clients.values():
                body = {**LONG, "stream": True}
                lines.append(streams.enter_context(client.stream("POST", "/v1/completions", json=body)).iter_lines())
                next(lines[-1])
            pids = [*front_end_pids(running), running.engine_pid]
            running.process.send_signal(signal.SIGTERM)
            for own in lines:
                assert [line for line in own if line][-1] == "data: [DONE]"
        running.process.wait(60)
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    finally:
        running.stop()
