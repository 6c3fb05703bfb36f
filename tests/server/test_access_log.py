"""Every response has an id, the client's own if it sent one, and the line about it has the same."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from slipstream.server.access_log import LineLimit
from slipstream.server.settings import ServerSettings
from slipstream.text.tokenizer import Tokenizer

from .scripted import ScriptedServer

HEADER = "X-Request-Id"
BODY = {"prompt": "x", "max_tokens": 3}


def logged_ids(capsys: pytest.CaptureFixture[str]) -> list[tuple[int, str]]:
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    return [(line["status"], line["request_id"]) for line in lines]


ANSWERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "an answer": ("POST", "/v1/completions", {"json": BODY}),
    "a stream": ("POST", "/v1/completions", {"json": {**BODY, "stream": True}}),
    "a wrong field": ("POST", "/v1/completions", {"json": {**BODY, "n": 0}}),
    "no json": ("POST", "/v1/completions", {"content": b"{"}),
    "no such route": ("GET", "/nowhere", {}),
    "the wrong method": ("GET", "/v1/completions", {}),
    "a status": ("GET", "/health", {}),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_clients_id_comes_back_with_every_answer(
    scripted: ScriptedServer, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    method, path, sent = ANSWERS[name]
    answer = scripted.ask(method, path, headers={HEADER: "trace 1/a:b"}, **sent)
    assert answer.headers[HEADER] == "trace 1/a:b"
    assert logged_ids(capsys) == [(answer.status_code, "trace 1/a:b")]


@pytest.mark.parametrize("given", [None, "", "x" * 129, b"caf\xc3\xa9"])
def test_without_a_usable_id_one_is_made(
    scripted: ScriptedServer, given: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [scripted.ask("GET", "/health", headers={} if given is None else {HEADER: given}) for _ in range(2)]
    ids = [answer.headers[HEADER] for answer in answers]
    assert all(one.isalnum() and 16 <= len(one) <= 128 for one in ids)
    assert ids[0] != ids[1]
    assert logged_ids(capsys) == [(200, one) for one in ids]


def test_a_control_character_in_a_header_is_no_http(scripted: ScriptedServer) -> None:
    answer = scripted.ask("GET", "/health", headers={HEADER: "bell\x07"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert answer.headers[HEADER].isalnum()


def test_the_longest_id(scripted: ScriptedServer) -> None:
    assert scripted.ask("GET", "/health", headers={HEADER: "x" * 128}).headers[HEADER] == "x" * 128


def test_refusals_have_an_id(tokenizer: Tokenizer) -> None:
    settings = ServerSettings(api_key="secret", max_body_bytes=10, log_requests=False)
    server = ScriptedServer(tokenizer, [("a", 0, 0)], settings)
    refused = server.ask("GET", "/v1/models", headers={HEADER: "mine"})
    assert (refused.status_code, refused.headers[HEADER]) == (401, "mine")
    large = server.ask("POST", "/tokenize", content=b"x" * 11, headers={HEADER: "mine", "X-API-Key": "secret"})
    assert (large.status_code, large.headers[HEADER]) == (413, "mine")
    server.close()


def test_a_bug_is_an_answer_with_an_id_and_a_line(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("by design")

    monkeypatch.setattr(scripted.client.tokenizer, "encode", fail)
    answer = scripted.ask("POST", "/tokenize", json={"prompt": "x"}, headers={HEADER: "mine"})
    assert answer.status_code == 500
    assert answer.headers[HEADER] == "mine"
    assert answer.json()["error"]["message"] == "ZeroDivisionError: by design"
    assert logged_ids(capsys) == [(500, "mine")]


def test_a_bug_leaves_its_trace_in_the_log(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scripted.client.tokenizer, "encode", None)
    assert scripted.ask("POST", "/tokenize", json={"prompt": "x"}).status_code == 500
    (record,) = [record for record in caplog.records if record.exc_info]
    assert record.exc_info is not None and record.exc_info[0] is TypeError


def test_a_flood_of_requests_makes_no_flood_of_lines() -> None:
    limit = LineLimit(rate=10, most_at_once=20)
    start = limit._time
    assert sum(limit.take(start + i / 1000) for i in range(1000)) == 20 + 9, "what there was, and a second's worth"
    assert limit.num_left_out == 971
    assert limit.take(start + 60)


def test_lines_left_out_are_counted_in_the_next_one(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter([False, False, True, True])

    def take(limit: LineLimit, _now: float) -> bool:
        limit.num_left_out += not (has_credit := next(answers))
        return has_credit

    monkeypatch.setattr(LineLimit, "take", take)
    server = ScriptedServer(tokenizer, [("a", 0, 0)])

    async def ask() -> None:
        async with server.http() as http:
            for _ in range(4):
                await http.get("/health")

    asyncio.run(ask())
    server.close()
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    assert [line.get("lines_left_out") for line in lines] == [2, None]
