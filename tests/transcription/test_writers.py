"""Transcripts in every format, against the formats as they are published."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from slipstream.errors import RequestError
from slipstream.transcription.languages import NAMES, find_language
from slipstream.transcription.options import TranscriptionOptions
from slipstream.transcription.result import Segment, Transcription, Word
from slipstream.transcription.window import measure_compression
from slipstream.transcription.writers import SUFFIXES, WRITERS, write_verbose_json


def segment(idx: int, start: float, end: float, text: str) -> Segment:
    return Segment(idx, 0, start, end, text, (50364, 1, 50365), 0.0, -0.25, 1.5, 0.01)


RESULT = Transcription(
    "Hello there. Général -->\n\nKenobi",
    "en",
    3725.04,
    "transcribe",
    [
        segment(0, 0.0, 1.5, " Hello there."),
        segment(1, 1.5, 1.6, "  "),
        segment(2, 3599.9996, 3725.04, " Général -->\n\nKenobi"),
    ],
)


def test_srt() -> None:
    assert WRITERS["srt"](RESULT) == (
        "1\n00:00:00,000 --> 00:00:01,500\nHello there.\n\n2\n01:00:00,000 --> 01:02:05,040\nGénéral ->\nKenobi\n\n"
    )


def test_vtt() -> None:
    assert WRITERS["vtt"](RESULT) == (
        "WEBVTT\n\n00:00.000 --> 00:01.500\nHello there.\n\n01:00:00.000 --> 01:02:05.040\nGénéral ->\nKenobi\n\n"
    )


def test_words() -> None:
    """A cue for each; in verbose_json beside the segments, without the space before them."""
    words = [Word(" Hello", 0.0, 0.5), Word(" there.", 0.5, 1.5)]
    one = replace(RESULT, segments=[replace(RESULT.segments[0], words=words)])
    assert WRITERS["vtt"](one) == "WEBVTT\n\n00:00.000 --> 00:00.500\nHello\n\n00:00.500 --> 00:01.500\nthere.\n\n"
    assert WRITERS["srt"](one).count(" --> ") == 2
    found = json.loads(write_verbose_json(one, with_segments=False))
    assert "segments" not in found
    assert found["words"] == [
        {"word": "Hello", "start": 0.0, "end": 0.5},
        {"word": "there.", "start": 0.5, "end": 1.5},
    ]
    (described,) = json.loads(WRITERS["verbose_json"](one))["segments"]
    assert "words" not in described and "words" not in json.loads(WRITERS["verbose_json"](RESULT))


def test_json() -> None:
    usage = {"type": "duration", "seconds": 3725}
    assert json.loads(WRITERS["json"](RESULT)) == {"text": RESULT.text, "usage": usage}
    found = json.loads(WRITERS["verbose_json"](RESULT))
    assert found["language"] == "english" and found["duration"] == 3725.04 and found["usage"] == usage
    assert found["segments"][0] == {
        "id": 0,
        "seek": 0,
        "start": 0.0,
        "end": 1.5,
        "text": " Hello there.",
        "tokens": [50364, 1, 50365],
        "temperature": 0.0,
        "avg_logprob": -0.25,
        "compression_ratio": 1.5,
        "no_speech_prob": 0.01,
    }


def test_every_format_writes_nothing_of_nothing() -> None:
    assert WRITERS.keys() == SUFFIXES.keys()
    empty = Transcription("", "en", 0.0, "transcribe")
    assert [WRITERS[name](empty) for name in ("text", "srt", "vtt")] == ["", "", "WEBVTT\n\n"]


def test_languages() -> None:
    assert len(NAMES) == 100
    assert find_language("German", NAMES) == find_language(" de ", NAMES) == "de"
    with pytest.raises(RequestError, match="does not know the language 'germn'; did you mean 'german'"):
        find_language("germn", NAMES)
    with pytest.raises(RequestError, match="does not know the language 'de'"):
        find_language("de", ("en",))


def test_compression() -> None:
    assert measure_compression("la " * 200) > 20 and measure_compression("a sentence of words") < 1


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"task": "sing"}, "task must be transcribe or translate"),
        ({"temperatures": ()}, "one to sixteen"),
        ({"temperatures": (-0.1,)}, "temperature must be a number"),
        ({"language": 5}, "language must be a text"),
        ({"prompt": "\ud800"}, "prompt must be a text"),
        ({"logprob_threshold": "x"}, "logprob_threshold must be a number"),
    ],
)
def test_refusals(settings: dict[str, object], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        TranscriptionOptions(**settings)  # type: ignore[arg-type]
    assert TranscriptionOptions(temperatures=0.5).temperatures == (0.5,)  # type: ignore[arg-type]
