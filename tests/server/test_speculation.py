"""What answers say of drafts: figures where the engine drafts, nothing where it does not, warnings where they lie."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI

from slipstream import __version__
from slipstream.output import SYNTHETIC_NOTICE
from slipstream.server.protocol import MAX_REQUEST_DRAFTS
from slipstream.text.tokenizer import Tokenizer

from .conftest import MODEL_NAME, RunningServer, start_server
from .scripted import ScriptedServer, chunks_of

STEPS = [("a", 0, 0), ("bcd", 3, 2), ("e", 2, 0)]
FIGURES = {"drafts": 5, "accepted": 2, "mean_length": 2.0, "acceptance_by_position": [0.5, 0.5, 0.0]}
NGRAM = {"speculate": "ngram", "k": 3}
RATES = {"method": "ngram", "num_speculative_tokens": 3, "verify": "synthetic", "acceptance_rates": [0.9, 0.5, 0.1]}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
ROUTES = [("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", CHAT)]
WARNING = "x-slipstream-warning"


def scripted(tokenizer: Tokenizer, **options: Any) -> Iterator[ScriptedServer]:
    server = ScriptedServer(tokenizer, STEPS, **options)
    yield server
    server.close()


@pytest.fixture
def drafting(tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    yield from scripted(tokenizer, **NGRAM)


@pytest.fixture
def plain(tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    yield from scripted(tokenizer)


@pytest.fixture
def synthetic(tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    yield from scripted(tokenizer, speculative_config=RATES)


def post(server: ScriptedServer, path: str, body: dict[str, Any], **more: Any) -> httpx.Response:
    return server.post(path, **body, **more)


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_whole_answer_has_figures(drafting: ScriptedServer, path: str, body: dict[str, Any]) -> None:
    answer = post(drafting, path, body, n=2).json()
    for choice in answer["choices"]:
        assert choice["speculation"] == {**FIGURES, "synthetic": None}
    details = {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 6}
    assert answer["usage"]["completion_tokens_details"] == details
    assert answer["usage"]["completion_tokens"] == 10


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_the_last_chunk_of_a_stream_has_figures(drafting: ScriptedServer, path: str, body: dict[str, Any]) -> None:
    answer = post(drafting, path, body, stream=True, stream_options={"include_usage": True})
    assert WARNING not in answer.headers
    *others, last, usage = chunks_of(answer)
    assert all("speculation" not in choice for chunk in others for choice in chunk["choices"])
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["choices"][0]["speculation"] == FIGURES
    details = {"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 3}
    assert usage["usage"]["completion_tokens_details"] == details
    assert usage["system_fingerprint"] == last["system_fingerprint"]


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_without_drafts_there_is_nothing_to_say(plain: ScriptedServer, path: str, body: dict[str, Any]) -> None:
    answer = post(plain, path, body)
    assert "speculation" not in answer.json()["choices"][0]
    assert "completion_tokens_details" not in answer.json()["usage"]
    assert answer.json()["system_fingerprint"].rpartition("-")[0] == f"slipstream-{__version__}"
    assert WARNING not in answer.headers
    assert "speculation" not in post(plain, path, body, stream=True).text


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_synthetic_acceptance_is_loud(
    synthetic: ScriptedServer, path: str, body: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    whole, stream = post(synthetic, path, body), post(synthetic, path, body, stream=True)
    for answer in (whole, stream):
        assert answer.headers[WARNING] == f"synthetic acceptance: {SYNTHETIC_NOTICE}"
    assert whole.json()["choices"][0]["speculation"]["synthetic"] == SYNTHETIC_NOTICE
    assert whole.json()["system_fingerprint"].endswith("-synthetic")
    chunks = chunks_of(stream)
    assert chunks[-1]["choices"][0]["speculation"]["synthetic"] == SYNTHETIC_NOTICE
    assert all(chunk["system_fingerprint"].endswith("-synthetic") for chunk in chunks)
    for line in capsys.readouterr().err.splitlines():
        logged = json.loads(line)
        assert (logged["drafts"], logged["accepted"], logged["synthetic"]) == (5, 2, SYNTHETIC_NOTICE)


def test_refusals_and_metrics_carry_the_warning_too(synthetic: ScriptedServer, drafting: ScriptedServer) -> None:
    assert WARNING in post(synthetic, "/v1/completions", {"prompt": "x", "n": 0}).headers
    assert WARNING in synthetic.ask("GET", "/nowhere").headers
    metrics = synthetic.ask("GET", "/metrics")
    assert WARNING in metrics.headers
    assert "\nslipstream_synthetic_acceptance 1.0\n" in metrics.text
    assert "synthetic" not in drafting.ask("GET", "/metrics").text


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (True, None, 3)),
        ({"speculate": None, "max_k": None}, (True, None, 3)),
        ({"speculate": True}, (True, None, 3)),
        ({"speculate": False}, (False, None, 0)),
        ({"max_k": 2}, (True, 2, 2)),
        ({"max_k": 0}, (True, 0, 0)),
        ({"max_k": MAX_REQUEST_DRAFTS}, (True, MAX_REQUEST_DRAFTS, 3)),
    ],
)
def test_switches_reach_the_request(
    drafting: ScriptedServer, path: str, body: dict[str, Any], fields: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    assert post(drafting, path, body, **fields).status_code == 200
    (request,) = drafting.engine.requests
    most = drafting.client.config.num_drafts
    assert (request.params.speculate, request.params.max_k, request.num_drafts(most)) == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"speculate": "no"}, "speculate"), ({"max_k": -1}, "max_k"), ({"max_k": 65}, "max_k"), ({"max_k": 1.5}, "max_k")],
)
def test_wrong_switches_are_named(drafting: ScriptedServer, fields: dict[str, Any], param: str) -> None:
    answer = post(drafting, *ROUTES[0], **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_openais_client_reads_the_answers(drafting: ScriptedServer, synthetic: ScriptedServer) -> None:
    async def talk(server: ScriptedServer) -> tuple[Any, list[Any]]:
        async with server.serving() as url, AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client:
            whole = await client.chat.completions.create(model="tiny", **CHAT)  # type: ignore[call-overload]
            stream = await client.completions.create(model="tiny", prompt="hi", stream=True)
            return whole, [chunk async for chunk in stream]

    whole, chunks = asyncio.run(talk(drafting))
    assert whole.choices[0].message.content == "abcde"
    assert whole.choices[0].speculation == {**FIGURES, "synthetic": None}
    details = whole.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (2, 3)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abcde"
    assert chunks[-1].choices[0].speculation == FIGURES
    whole, chunks = asyncio.run(talk(synthetic))
    assert whole.system_fingerprint.endswith("-synthetic") and chunks[0].system_fingerprint.endswith("-synthetic")


@pytest.fixture(scope="module")
def running(model_folder: Path) -> Iterator[RunningServer]:
    """A real engine that drafts, in its own process."""
    server = start_server(model_folder, "--speculate", "ngram", "--k", "3", "--dtype", "float64")
    yield server
    server.stop()


def test_drafts_change_the_figures_and_not_the_text(running: RunningServer) -> None:
    client = OpenAI(base_url=f"{running.url}/v1", api_key="unused", max_retries=0)

    def text_and_figures(**extra: Any) -> tuple[str, dict[str, Any], Any]:
        answer = client.completions.create(
            model=MODEL_NAME,
            prompt="one two one two one two",
            temperature=0,
            max_tokens=60,
            extra_body={"ignore_eos": True, **extra},
        )
        assert answer.usage is not None and answer.usage.completion_tokens == 60
        return answer.choices[0].text, answer.choices[0].speculation, answer.usage.completion_tokens_details  # type: ignore[attr-defined]

    before = running.metric("draft_tokens_total")
    text, figures, details = text_and_figures()
    assert figures["drafts"] > 0
    assert len(figures["acceptance_by_position"]) <= 3
    assert details.accepted_prediction_tokens == figures["accepted"]
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens == figures["drafts"]
    same, off, _ = text_and_figures(speculate=False)
    assert same == text
    assert (off["drafts"], off["accepted"], off["mean_length"]) == (0, 0, 1.0)
    same, one, _ = text_and_figures(max_k=1)
    assert same == text
    assert len(one["acceptance_by_position"]) <= 1
    running.wait_until_idle()
    assert running.metric("draft_tokens_total") - before == figures["drafts"] + one["drafts"]
    assert running.metric("mean_accepted_length") >= 1.0


def test_the_stream_of_a_real_engine_ends_with_figures(running: RunningServer) -> None:
    client = OpenAI(base_url=f"{running.url}/v1", api_key="unused", max_retries=0)
    settings = {"model": MODEL_NAME, "temperature": 0, "max_tokens": 30, "extra_body": {"ignore_eos": True}}
    whole = client.chat.completions.create(**CHAT, **settings)  # type: ignore[call-overload]
    chunks = list(client.chat.completions.create(stream=True, **CHAT, **settings))  # type: ignore[call-overload]
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
    told = chunks[-1].choices[0].speculation
    assert {**told, "synthetic": None} == whole.choices[0].speculation
    assert not any(hasattr(c.choices[0], "speculation") for c in chunks[:-1])


def test_a_synthetic_server_warns_at_its_start(model_folder: Path) -> None:
    server = start_server(model_folder, "--speculative-config", json.dumps(RATES))
    try:
        assert " WARNING synthetic acceptance: " in server.wait_for_line("synthetic acceptance")
        asked = {"prompt": "ababababab", "max_tokens": 40, "ignore_eos": True, "seed": 1}
        answer = httpx.post(f"{server.url}/v1/completions", json=asked)
        assert answer.headers[WARNING].startswith("synthetic acceptance: ")
        figures = answer.json()["choices"][0]["speculation"]
        assert figures["synthetic"] == SYNTHETIC_NOTICE
        assert figures["accepted"] > 0
        assert server.metric("synthetic_acceptance") == 1
    finally:
        server.stop()
