"""Transcripts as text, JSON and subtitles."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any, NamedTuple

from slipstream.transcription.languages import name_language
from slipstream.transcription.result import Segment, Transcription


def write_text(result: Transcription) -> str:
    """A line for each segment, as they are spoken one after the other."""
    return "".join(f"{segment.text.strip()}\n" for segment in result.segments)


def write_json(result: Transcription) -> str:
    return dump_json({"text": result.text, "usage": describe_usage(result)})


def write_verbose_json(result: Transcription, with_segments: bool = True) -> str:
    described = {
        "task": result.task,
        "language": name_language(result.language),
        "duration": result.duration,
        "text": result.text,
    }
    if with_segments:
        described["segments"] = [describe_segment(segment) for segment in result.segments]
    if any(segment.words is not None for segment in result.segments):
        words = [word for segment in result.segments for word in segment.words or ()]
        described["words"] = [{"word": own.word.strip(), "start": own.start, "end": own.end} for own in words]
    return dump_json({**described, "usage": describe_usage(result)})


def write_srt(result: Transcription) -> str:
    cues = (
        f"{number}\n{_clock(cue.start, ',')} --> {_clock(cue.end, ',')}\n{_cue_text(cue.text)}\n\n"
        for number, cue in enumerate(_cues(result), 1)
    )
    return "".join(cues)


def write_vtt(result: Transcription) -> str:
    cues = (
        f"{_short_clock(cue.start)} --> {_short_clock(cue.end)}\n{_cue_text(cue.text)}\n\n" for cue in _cues(result)
    )
    return "WEBVTT\n\n" + "".join(cues)


WRITERS: dict[str, Callable[[Transcription], str]] = {
    "text": write_text,
    "json": write_json,
    "verbose_json": write_verbose_json,
    "srt": write_srt,
    "vtt": write_vtt,
}
SUFFIXES = {"text": ".txt", "json": ".json", "verbose_json": ".json", "srt": ".srt", "vtt": ".vtt"}


def dump_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def describe_usage(result: Transcription) -> dict[str, Any]:
    return {"type": "duration", "seconds": round(result.duration)}


def describe_segment(segment: Segment) -> dict[str, Any]:
    fields = {**asdict(segment), "tokens": list(segment.tokens)}
    del fields["words"]  # which are those of the whole transcript
    return fields


class _Cue(NamedTuple):
    start: float
    end: float
    text: str


def _cues(result: Transcription) -> Iterable[_Cue]:
    """One for each word where words have times, else one for each segment."""
    for segment in result.segments:
        if segment.words is not None:
            yield from (_Cue(own.start, own.end, own.word) for own in segment.words if own.word.strip())
        elif segment.text.strip():
            yield _Cue(segment.start, segment.end, segment.text)


def _cue_text(text: str) -> str:
    """An arrow would begin another cue, and so would an empty line."""
    lines = (line.strip() for line in text.strip().splitlines())
    return "\n".join(line for line in lines if line).replace("-->", "->")


def _clock(seconds: float, point: str) -> str:
    total = round(max(0.0, seconds) * 1000)
    minutes, milliseconds = divmod(total, 60_000)
    hours, minutes = divmod(minutes, 60)
    whole, milliseconds = divmod(milliseconds, 1000)
    return f"{hours:02d}:{minutes:02d}:{whole:02d}{point}{milliseconds:03d}"


def _short_clock(seconds: float) -> str:
    return _clock(seconds, ".").removeprefix("00:")
