"""The forms of ``/v1/audio/transcriptions`` and ``/v1/audio/translations``: their fields, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.errors import RequestError, nearest
from slipstream.server.errors import ApiError
from slipstream.server.http.multipart import FormPart
from slipstream.transcription.options import FALLBACKS, TranscriptionOptions
from slipstream.transcription.writers import WRITERS
from slipstream.values import describe_value

ROUTES = {"/v1/audio/transcriptions": "transcribe", "/v1/audio/translations": "translate"}
_COMMON = ("file", "model", "prompt", "response_format", "temperature")
_FIELDS = {
    "transcribe": (*_COMMON, "language", "stream", "timestamp_granularities", "chunking_strategy", "include"),
    "translate": _COMMON,
}
_SWITCHES = {"true": True, "1": True, "false": False, "0": False}
_STREAMED_FORMATS = ("json", "text")


@dataclass(frozen=True)
class SpeechForm:
    content: bytes
    file_name: str
    model: str | None
    response_format: str
    is_streamed: bool
    has_segments: bool  # in verbose_json
    options: TranscriptionOptions


def read_speech_form(parts: Sequence[FormPart], task: str) -> SpeechForm:
    fields = _gather(parts, task)
    file = next((part for part in parts if part.name == "file"), None)
    if file is None or not file.content:
        raise ApiError(400, "the form must have a sound file as the field 'file'", param="file")
    response_format = _choice(fields, "response_format", tuple(WRITERS), "json")
    is_streamed = _switch(fields, "stream")
    if is_streamed and response_format not in _STREAMED_FORMATS:
        raise ApiError(400, f"a stream is of format json or text, not {response_format}", param="response_format")
    granularities = _granularities(fields, response_format)
    try:
        options = TranscriptionOptions(
            language=_one(fields, "language") or None,
            task=task,
            prompt=_one(fields, "prompt") or None,
            temperatures=_temperatures(fields),
            no_speech_probs=response_format == "verbose_json",
            word_timestamps="word" in granularities,
            batched=_choice(fields, "chunking_strategy", ("auto", "none"), "none") == "auto",
        )
    except RequestError as error:
        raise ApiError(400, str(error)) from error
    name = file.file_name or "the file"
    has_segments = not granularities or "segment" in granularities
    model = _one(fields, "model")
    return SpeechForm(bytes(file.content), name, model, response_format, is_streamed, has_segments, options)


def _gather(parts: Sequence[FormPart], task: str) -> dict[str, list[str]]:
    """The texts of fields; lists are written with brackets after the name."""
    found: dict[str, list[str]] = {}
    for part in parts:
        name = part.name.partition("[")[0]
        if name not in _FIELDS[task]:
            raise ApiError(400, f"unknown field {describe_value(part.name)}{nearest(name, _FIELDS[task])}", param=name)
        if name != "file":
            found.setdefault(name, []).append(part.text)
    return found


def _one(fields: dict[str, list[str]], name: str) -> str | None:
    given = fields.get(name, [])
    if len(given) > 1:
        raise ApiError(400, f"{name} is given {len(given)} times", param=name)
    return given[0] if given else None


def _choice(fields: dict[str, list[str]], name: str, known: Sequence[str], default: str) -> str:
    given = _one(fields, name)
    if given is not None and given not in known:
        raise ApiError(400, f"{name} must be {' or '.join(known)}, not {describe_value(given)}", param=name)
    return given or default


def _switch(fields: dict[str, list[str]], name: str) -> bool:
    given = _one(fields, name)
    if given is None:
        return False
    if given.lower() not in _SWITCHES:
        raise ApiError(400, f"{name} must be true or false, not {describe_value(given)}", param=name)
    return _SWITCHES[given.lower()]


def _temperatures(fields: dict[str, list[str]]) -> tuple[float, ...]:
    """As in OpenAI's API: zero is raised where the text is improbable or repeats itself, another stays."""
    given: Any = _one(fields, "temperature")
    try:
        value = float(given) if given else 0.0
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1.0:
        raise ApiError(
            400, f"temperature must be a number from 0 to 1, not {describe_value(given)}", param="temperature"
        )
    return FALLBACKS if value == 0.0 else (value,)


def _granularities(fields: dict[str, list[str]], response_format: str) -> list[str]:
    if fields.get("include"):
        raise ApiError(400, "include is not supported; verbose_json has avg_logprob of each segment", param="include")
    given = fields.get("timestamp_granularities", [])
    if given and (response_format != "verbose_json" or not set(given) <= {"word", "segment"}):
        reason = "timestamp_granularities must be word or segment, with response_format verbose_json"
        raise ApiError(400, reason, param="timestamp_granularities")
    return given
