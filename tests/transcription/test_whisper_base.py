"""Whisper base from its CTranslate2 files: the words are those of faster-whisper, and drafts change none of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream import LLM, Transcription, TranscriptionOptions
from tests.audio.sounds import JFK

# A folder with the models' folders, as faster-whisper has them.
FOLDER = Path(os.environ.get("SLIPSTREAM_TEST_MODELS", "models")) / "whisper-base"
OPTIONS = TranscriptionOptions(language="en", temperatures=(0.0,))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (FOLDER / "model.bin").is_file(), reason="SLIPSTREAM_TEST_MODELS has no whisper-base"),
]


def transcribe(options: TranscriptionOptions = OPTIONS, **engine: object) -> Transcription:
    with LLM(str(FOLDER), dtype="float32", max_num_seqs=2, **{"speculate": "none", **engine}) as llm:
        return llm.transcribe(JFK, options)[0]


@pytest.fixture(scope="module")
def plain() -> Iterator[Transcription]:
    yield transcribe()


def test_words_times_and_tokens_of_faster_whisper(plain: Transcription) -> None:
    faster_whisper = pytest.importorskip("faster_whisper")
    model = faster_whisper.WhisperModel(str(FOLDER), device="cpu", compute_type="float32")
    segments, _ = model.transcribe(str(JFK), language="en", beam_size=1, temperature=0.0)
    wanted = [(round(one.start, 2), round(one.end, 2), one.text, list(one.tokens)) for one in segments]
    assert [(one.start, one.end, one.text, list(one.tokens)) for one in plain.segments] == wanted


def test_times_of_words_of_faster_whisper() -> None:
    faster_whisper = pytest.importorskip("faster_whisper")
    model = faster_whisper.WhisperModel(str(FOLDER), device="cpu", compute_type="float32")
    segments, _ = model.transcribe(str(JFK), language="en", beam_size=1, temperature=0.0, word_timestamps=True)
    wanted = [(word.word, word.start, word.end) for one in segments for word in one.words]
    found = [word for one in transcribe(replace(OPTIONS, word_timestamps=True)).segments for word in one.words or ()]
    assert [word.word for word in found] == [word for word, _, _ in wanted]
    for word, (_, start, end) in zip(found, wanted, strict=True):
        assert (word.start, word.end) == (pytest.approx(start, abs=0.03), pytest.approx(end, abs=0.03))


def test_words(plain: Transcription) -> None:
    words = plain.text.lower().replace(",", "").rstrip(".")
    assert words == (
        "and so my fellow americans ask not what your country can do for you ask what you can do for your country"
    )


@pytest.mark.parametrize("drafts", ["ngram", "early_exit"])
def test_drafts_change_nothing(plain: Transcription, drafts: str) -> None:
    found = transcribe(speculate=drafts, k=3)
    assert [list(one.tokens) for one in found.segments] == [list(one.tokens) for one in plain.segments]
    assert found.speculation is not None and found.speculation.num_drafts > 0


def test_the_language_is_found_and_pieces_are_joined() -> None:
    found = transcribe(TranscriptionOptions(batched=True))
    assert found.language == "en" and "ask what you can do for your country" in found.text
