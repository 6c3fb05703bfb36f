"""What no client should send: a clear status each, nothing left over, and no delay for other clients."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from .conftest import MODEL_NAME, RunningServer, start_server

BODY = {"model": MODEL_NAME, "prompt": "x", "max_tokens": 2, "ignore_eos": True}  # two tokens, whatever is drawn
KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def guarded(model_folder: Path) -> Iterator[RunningServer]:
    running = start_server(model_folder, "--api-key", "secret", "--body-timeout-s", "1", "--max-queue", "4")
    yield running
    running.stop()


def post(server: RunningServer, **arguments: object) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", timeout=30, **arguments)  # type: ignore[arg-type]


def message_of(answer: httpx.Response) -> str:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["message"])


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}])
def test_no_key_no_answer(guarded: RunningServer, headers: dict[str, str]) -> None:
    for path in ("/v1/models", "/v1/completions", "/tokenize", "/nowhere"):
        answer = httpx.get(f"{guarded.url}{path}", headers=headers)
        assert answer.status_code == 401
        assert "API key" in message_of(answer)
    assert post(guarded, json=BODY, headers=headers).status_code == 401
    assert post(guarded, json=BODY, headers=KEY).status_code == 200
    for path in ("/health", "/metrics", "/version"):
        assert httpx.get(f"{guarded.url}{path}").status_code == 200, "monitors have no key"


def test_large_bodies(guarded: RunningServer) -> None:
    large = json.dumps({**BODY, "prompt": "x" * 10_000_000})
    try:
        answer = post(guarded, content=large, headers=KEY)
    except httpx.WriteError:
        pass  # the server hung up while we were still sending, which is its right
    else:
        assert answer.status_code == 413
        assert "larger than" in message_of(answer)

    def pieces() -> Iterator[bytes]:  # no length announced
        for _ in range(100):
            yield b"x" * 100_000

    with contextlib.suppress(httpx.WriteError):
        assert post(guarded, content=pieces(), headers=KEY).status_code == 413
    assert post(guarded, json=BODY, headers=KEY).status_code == 200


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"model": ', "not valid JSON"),
        (b"", "body"),
        (b"[]", "body"),
        (b'"text"', "body"),
        (b"\xff\xfe{}", "JSON|body|UTF"),
        (b'{"prompt": "\xff"}', "JSON|body|UTF"),
        (b'{"prompt": "\\ud800", "model": "tiny"}', "Unicode|surrogate|JSON|prompt"),
        (b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", "JSON|prompt|body"),
        (b'{"prompt": "x", "temperature": NaN}', "temperature|JSON"),
        (b'{"prompt": "x", "seed": 1e400}', "seed|JSON"),
        (b'{"prompt": "x", "logit_bias": {"\\ud800": 1}}', "token id|logit_bias"),
    ],
)
def test_malformed_bodies(guarded: RunningServer, content: bytes, message: str) -> None:
    answer = post(guarded, content=content, headers={**KEY, "Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert re.search(message, message_of(answer)), answer.text


def test_half_characters_come_back_whole(guarded: RunningServer) -> None:
    answer = post(
        guarded, content=b'{"prompt": "x", "model": "\\ud800"}', headers={**KEY, "Content-Type": "application/json"}
    )
    assert answer.status_code == 404
    assert "there is no model '?' here" in message_of(answer)


def test_routes_that_are_not(guarded: RunningServer) -> None:
    answer = httpx.get(f"{guarded.url}/v1/nowhere", headers=KEY)
    assert (answer.status_code, message_of(answer)) == (404, "there is no /v1/nowhere")
    answer = httpx.get(f"{guarded.url}/v1/completions", headers=KEY)
    assert (answer.status_code, message_of(answer)) == (405, "GET is not for /v1/completions")


def test_a_flood_of_headers(guarded: RunningServer) -> None:
    with guarded.connect() as flood:
        flood.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        try:
            for i in range(20_000):
                flood.sendall(b"X-%d: %s\r\n" % (i, b"y" * 100))
            flood.sendall(b"\r\n")
            answer = flood.recv(4096)
        except (BrokenPipeError, ConnectionResetError):
            answer = b""  # hung up on us
        assert answer == b"" or b"400" in answer.split(b"\r\n")[0] or b"431" in answer.split(b"\r\n")[0]
    assert httpx.get(f"{guarded.url}/health").status_code == 200


def test_slow_clients_delay_no_other(guarded: RunningServer) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\nContent-Length: 1000\r\n\r\n{"
    slow = [guarded.connect() for _ in range(20)]
    try:
        for client in slow:
            client.sendall(head)
        assert post(guarded, json=BODY, headers=KEY).status_code == 200
        answer = slow[0].recv(4096)
        assert b"408" in answer.split(b"\r\n")[0]
    finally:
        for client in slow:
            client.close()


def test_a_client_that_does_not_read_delays_no_other(guarded: RunningServer) -> None:
    with guarded.send({**BODY, "max_tokens": 400, "stream": True}, "Authorization: Bearer secret"):
        time.sleep(0.5)
        assert post(guarded, json=BODY, headers=KEY).status_code == 200
    guarded.wait_until_idle()


def test_a_full_queue_says_when_to_come_back(guarded: RunningServer) -> None:
    with ThreadPoolExecutor(40) as pool:  # eight run and four may wait
        with guarded.engine_at_rest():
            sent = [pool.submit(post, guarded, json=BODY, headers=KEY) for _ in range(40)]
            while sum(one.done() for one in sent) < 28:
                time.sleep(0.01)
        answers = [one.result() for one in sent]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(refused) == 28
    assert sum(answer.status_code == 200 for answer in answers) == 12
    assert refused[0].headers["retry-after"] == "1"
    assert "12 are allowed" in message_of(refused[0])
    assert post(guarded, json={**BODY, "n": 12}, headers=KEY).status_code == 200
    answer = post(guarded, json={**BODY, "n": 13}, headers=KEY)
    assert answer.status_code == 400, "no waiting would help"


def test_a_client_that_vanishes_from_the_queue_is_forgotten(guarded: RunningServer) -> None:
    busy = {**BODY, "max_tokens": 480, "ignore_eos": True, "n": 8}
    num_aborted, num_tokens = guarded.num_aborted(), guarded.metric("tokens_out_total")
    with ThreadPoolExecutor(1) as pool:
        with guarded.engine_at_rest():
            running = pool.submit(post, guarded, json=busy, headers=KEY)
            guarded.wait_until_open(8)
            with guarded.send({**BODY, "stream": True}, "Authorization: Bearer secret"):
                guarded.wait_until_open(9)
            guarded.wait_until_open(8)
        assert running.result().status_code == 200
    guarded.wait_until_idle()
    assert guarded.num_aborted() == num_aborted + 1
    assert guarded.metric("tokens_out_total") == num_tokens + 8 * 480, "none for the client that has left"


def test_a_long_prompt_is_refused_in_one_line(guarded: RunningServer) -> None:
    answer = post(guarded, json={**BODY, "prompt": "word " * 700_000}, headers=KEY)
    assert answer.status_code == 400 and "the context holds" in message_of(answer)


def test_every_request_is_one_line(guarded: RunningServer) -> None:
    post(guarded, json=BODY, headers={"X-Request-Id": "before"})
    post(guarded, json=BODY)
    post(guarded, json={**BODY, "bad": 1}, headers=KEY)
    post(guarded, json=BODY, headers=KEY)
    httpx.get(f"{guarded.url}/nowhere", headers={**KEY, "X-Request-Id": "last"})
    guarded.wait_for_line('"last"')
    before = guarded.lines.index(guarded.wait_for_line('"before"')) + 1  # what others have asked is written by then
    lines = [json.loads(line) for line in guarded.lines[before:] if line.startswith("{")]
    assert [line["status"] for line in lines] == [401, 400, 200, 404]
    assert (lines[2]["prompt_tokens"], lines[2]["output_tokens"]) == (1, 2)
    assert lines[2]["finish"] == ["length"]


def test_no_other_site_may_ask(guarded: RunningServer) -> None:
    answer = httpx.get(f"{guarded.url}/health", headers={"Origin": "http://elsewhere"})
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_a_taken_port_is_one_clear_line(guarded: RunningServer, model_folder: Path) -> None:
    port = str(urlsplit(guarded.url).port)
    command = [sys.executable, "-m", "slipstream", "serve", str(model_folder), "--port", port]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 2
    assert ran.stderr.strip().startswith(f"error: cannot listen on 127.0.0.1 port {port}")
