"""Transcribing with OpenAI's own client: every format, streams, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from slipstream import LLM, Transcription, TranscriptionOptions
from slipstream.transcription.writers import WRITERS
from tests.audio.sounds import JFK
from tests.transcription import tiny_whisper

from .conftest import MODEL_NAME, RunningServer, start_server

pytest.importorskip("soundfile")
# Random tokens repeat themselves and are improbable, so only a temperature of their own keeps them from fallbacks.
SETTINGS: dict[str, Any] = {"model": MODEL_NAME, "language": "de", "temperature": 0.01}


@pytest.fixture(scope="module")
def whisper_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whisper")
    tiny_whisper.save_ctranslate2(folder, tiny_whisper.make_model())
    return folder


@pytest.fixture(scope="module")
def speech_server(whisper_folder: Path) -> Iterator[RunningServer]:
    running = start_server(whisper_folder, "--seed", "1", "--max-upload-bytes", "2000000")
    yield running
    running.stop()


@pytest.fixture
def client(speech_server: RunningServer) -> OpenAI:
    return OpenAI(base_url=f"{speech_server.url}/v1", api_key="unused", max_retries=0)


@pytest.fixture(scope="module")
def expected(whisper_folder: Path) -> Transcription:
    with LLM(str(whisper_folder)) as llm:
        return llm.transcribe(JFK, TranscriptionOptions(language="de", temperatures=(0.0,), no_speech_threshold=None))[
            0
        ]


def create(client: OpenAI, **settings: Any) -> Any:
    with JFK.open("rb") as file:
        return client.audio.transcriptions.create(file=file, **{**SETTINGS, "temperature": 0.001, **settings})


def test_json(client: OpenAI, expected: Transcription) -> None:
    found = create(client)
    assert found.text == expected.text and expected.text
    assert found.usage.type == "duration" and found.usage.seconds == 11


def test_verbose_json(client: OpenAI, expected: Transcription) -> None:
    found = create(client, response_format="verbose_json", timestamp_granularities=["segment"])
    assert (found.text, found.language, found.duration) == (expected.text, "german", 11.0)
    assert [(one.start, one.end, one.text, one.tokens) for one in found.segments] == [
        (one.start, one.end, one.text, list(one.tokens)) for one in expected.segments
    ]
    assert all(one.temperature == 0.001 and one.avg_logprob < 0 for one in found.segments)


def test_words(client: OpenAI, expected: Transcription) -> None:
    found = create(client, response_format="verbose_json", timestamp_granularities=["word"])
    assert found.text == expected.text and found.segments is None
    assert "".join(found.text.split()) == "".join(one.word.replace(" ", "") for one in found.words)
    times = [time for one in found.words for time in (one.start, one.end)]
    assert times == sorted(times) and times[0] >= 0 and times[-1] <= 11.0
    both = create(client, response_format="verbose_json", timestamp_granularities=["word", "segment"])
    assert both.words == found.words and len(both.segments) == len(expected.segments)


@pytest.mark.parametrize("response_format", ["text", "srt", "vtt"])
def test_formats_of_text(client: OpenAI, expected: Transcription, response_format: str) -> None:
    wanted = f"{expected.text}\n" if response_format == "text" else WRITERS[response_format](expected)
    assert create(client, response_format=response_format) == wanted


def test_stream(client: OpenAI, expected: Transcription) -> None:
    events = list(create(client, stream=True))
    assert [event.type for event in events] == ["transcript.text.delta", "transcript.text.done"]
    assert events[0].delta.strip() == events[-1].text == expected.text


def test_translations(client: OpenAI) -> None:
    # The client marks its whole API of translations as deprecated.
    with JFK.open("rb") as file, pytest.warns(DeprecationWarning):
        found = client.audio.translations.create(
            file=file, model=MODEL_NAME, prompt="Names: Ada", temperature=0.001, response_format="verbose_json"
        )
    assert found.text and found.duration == 11.0


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"timestamp_granularities": ["syllable"], "response_format": "verbose_json"}, "must be word or segment"),
    ({"timestamp_granularities": ["segment"]}, "with response_format verbose_json"),
    ({"response_format": "diarized_json"}, "response_format must be text or json"),
    ({"stream": True, "response_format": "srt"}, "a stream is of format json or text"),
    ({"language": "klingon"}, "does not know the language 'klingon'"),
    ({"temperature": 2}, "temperature must be a number from 0 to 1"),
    ({"include": ["logprobs"]}, "include is not supported"),
    ({"extra_body": {"languag": "de"}}, "unknown field 'languag'; did you mean 'language'?"),
    ({"chunking_strategy": {"type": "server_vad"}}, "chunking_strategy must be auto or none, not 'server_vad'"),
]


@pytest.mark.parametrize(("settings", "reason"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_refusals(client: OpenAI, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, **settings)
    assert reason in str(caught.value)


def test_broken_sounds_and_other_models(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"song.mp3 is no sound file that can be read"):
        client.audio.transcriptions.create(file=("song.mp3", b"no sound"), model=MODEL_NAME)
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4o-transcribe' here"):
        create(client, model="gpt-4o-transcribe")
    with pytest.raises(openai.APIStatusError) as caught:
        client.audio.transcriptions.create(file=("a.wav", b"x" * 2_000_001), model=MODEL_NAME)
    assert caught.value.status_code == 413
    with pytest.raises(openai.BadRequestError, match="this model has an encoder"):
        client.completions.create(model=MODEL_NAME, prompt="hello")


@pytest.mark.parametrize(
    ("content_type", "content", "status", "reason"),
    [
        ("application/json", b"{}", 415, "the body must be a form"),
        ("multipart/form-data", b"--b--", 400, "must have a boundary"),
        ("multipart/form-data; boundary=b", b"--b--", 400, "must have a sound file as the field 'file'"),
        ("multipart/form-data; boundary=b", b"--b\r\n", 400, "the form ends in the headers of a part"),
    ],
)
def test_forms(speech_server: RunningServer, content_type: str, content: bytes, status: int, reason: str) -> None:
    url = f"{speech_server.url}/v1/audio/transcriptions"
    found = httpx.post(url, content=content, headers={"content-type": content_type}, timeout=60)
    assert found.status_code == status and reason in found.json()["error"]["message"]
    assert httpx.get(url).status_code == 405


def test_a_body_that_is_too_large_is_refused_before_it_comes(speech_server: RunningServer) -> None:
    with speech_server.connect() as client:
        client.sendall(b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: x\r\nContent-Length: 99000000\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 413 ")


def test_a_client_that_leaves_frees_everything(speech_server: RunningServer) -> None:
    with (
        JFK.open("rb") as file,
        pytest.raises(httpx.ReadTimeout),
        speech_server.engine_at_rest(),
    ):
        url = f"{speech_server.url}/v1/audio/transcriptions"
        httpx.post(url, files={"file": file}, data=SETTINGS, timeout=httpx.Timeout(60, read=0.5))
    speech_server.wait_until_open(0)
    speech_server.wait_until_idle()


def test_a_model_of_text_reads_no_sound(server: RunningServer) -> None:
    found = httpx.post(f"{server.url}/v1/audio/transcriptions", files={"file": b"RIFF"}, timeout=60)
    assert found.status_code == 400 and "this model reads no sound" in found.json()["error"]["message"]


def test_the_log_and_the_metrics_know_the_route(speech_server: RunningServer, client: OpenAI) -> None:
    create(client)
    line = json.loads(speech_server.wait_for_line('"/v1/audio/transcriptions", "status": 200'))
    assert line["method"] == "POST" and line["total_ms"] > 0
    metrics = httpx.get(f"{speech_server.url}/metrics", timeout=60).text
    assert 'path="/v1/audio/transcriptions",status="200"' in metrics
