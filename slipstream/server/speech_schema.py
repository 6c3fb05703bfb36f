"""The schema of transcribing, for the documentation of the API: forms are read in ``speech_form``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from slipstream.transcription.writers import WRITERS


class DurationUsage(BaseModel):
    type: Literal["duration"]
    seconds: int


class TranscriptionSegment(BaseModel):
    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float | None


class TranscriptionWord(BaseModel):
    word: str
    start: float
    end: float


class TranscriptionResponse(BaseModel):
    """Of format json; verbose_json has all fields."""

    text: str
    usage: DurationUsage
    task: str | None = None
    language: str | None = None
    duration: float | None = None
    segments: list[TranscriptionSegment] | None = None
    words: list[TranscriptionWord] | None = None


def describe_form(task: str) -> dict[str, Any]:
    properties: dict[str, Any] = {
        "file": {"type": "string", "format": "binary", "description": "A sound file: WAV, FLAC, MP3, OGG."},
        "model": {"type": "string", "description": "Any name this server lists; its model if left out."},
        "prompt": {"type": "string", "description": "Text as if it came before, for names and style."},
        "response_format": {"type": "string", "enum": list(WRITERS), "default": "json"},
        "temperature": {"type": "number", "minimum": 0, "maximum": 1, "default": 0},
    }
    if task == "transcribe":
        granularities = {"type": "array", "items": {"type": "string", "enum": ["word", "segment"]}}
        properties |= {
            "language": {"type": "string", "description": "A code or a name; detected if left out."},
            "stream": {"type": "boolean", "default": False},
            "chunking_strategy": {
                "type": "string",
                "enum": ["auto", "none"],
                "description": "auto: pieces, cut where it is quiet, are transcribed at the same time.",
            },
            "timestamp_granularities[]": granularities,
        }
    return {"type": "object", "properties": properties, "required": ["file"]}
