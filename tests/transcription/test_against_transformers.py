"""Sounds longer than a window: segments, times and tokens are those of transformers' ``generate``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, WhisperForConditionalGeneration

from slipstream import LLM, Transcription, TranscriptionOptions
from slipstream.audio.log_mel import compute_log_mel
from tests.audio.sounds import Samples, make_noise
from tests.transcription import tiny_whisper

SECONDS = 48
NO_FALLBACK = {"temperatures": (0.0,), "no_speech_threshold": None, "condition_on_previous_text": False}


@pytest.fixture(scope="module")
def model() -> WhisperForConditionalGeneration:
    made = tiny_whisper.make_model().double()  # so that equal likely tokens are no matter of rounding
    first = tiny_whisper.FIRST_LANGUAGE
    made.generation_config = GenerationConfig(
        eos_token_id=tiny_whisper.END,
        pad_token_id=tiny_whisper.END,
        decoder_start_token_id=tiny_whisper.START,
        suppress_tokens=tiny_whisper.SUPPRESSED,
        begin_suppress_tokens=tiny_whisper.SUPPRESSED_AT_BEGIN,
        no_timestamps_token_id=tiny_whisper.NO_TIMESTAMPS,
        is_multilingual=True,
        lang_to_id={f"<|{code}|>": first + i for i, code in enumerate(tiny_whisper.LANGUAGES)},
        task_to_id={"translate": first + 3, "transcribe": first + 4},
        max_initial_timestamp_index=50,
        max_length=448,
    )
    return made


@pytest.fixture(scope="module")
def llm(model: WhisperForConditionalGeneration, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("whisper")
    config = model.generation_config
    tiny_whisper.save_folder(folder, model)
    model.generation_config = config
    with LLM(str(folder), max_num_seqs=3, dtype="float64") as engine:
        yield engine


def make_sound(seed: int, seconds: float = SECONDS) -> Samples:
    noise = make_noise(int(16_000 * seconds), seed)
    return noise * np.square(np.sin(np.arange(len(noise)) / 8000 * (1 + seed))).astype(np.float32)


def expected(model: WhisperForConditionalGeneration, sound: Samples, **settings: Any) -> list[dict[str, Any]]:
    num_frames = len(sound) // 160
    features = compute_log_mel(np.pad(sound, (0, 160)), 80)[:, :num_frames]
    logging.getLogger("transformers").setLevel(logging.ERROR)
    found = model.generate(
        torch.from_numpy(features)[None].double(),
        attention_mask=torch.ones(1, num_frames),
        return_timestamps=True,
        return_segments=True,
        condition_on_prev_tokens=False,
        max_new_tokens=224,
        do_sample=False,
        **{"language": "en", "task": "transcribe", **settings},
    )
    segments: list[dict[str, Any]] = found["segments"][0]
    return segments


def plain(segment: dict[str, Any]) -> tuple[float, float, list[int]]:
    """A window's last segment ends with one timestamp here, and in transformers with the next segment's too."""
    tokens = segment["tokens"].tolist()
    if min(tokens[-2:]) >= tiny_whisper.FIRST_TIMESTAMP:
        tokens.pop()
    return round(float(segment["start"]), 2), round(float(segment["end"]), 2), tokens


def test_segments(model: WhisperForConditionalGeneration, llm: LLM) -> None:
    sound = make_sound(0)
    wanted = [segment for segment in map(plain, expected(model, sound)) if segment[0] != segment[1]]
    (result,) = llm.transcribe(sound, TranscriptionOptions(language="en", **NO_FALLBACK))
    found = [(segment.start, segment.end, list(segment.tokens)) for segment in result.segments]
    assert found == wanted and len(found) > 5
    assert result.duration == SECONDS
    assert {segment.seek for segment in result.segments} > {0}
    assert [segment.id for segment in result.segments] == list(range(len(found)))


def test_the_language_is_the_likeliest(model: WhisperForConditionalGeneration, llm: LLM) -> None:
    for seed in range(2):
        sound = make_sound(seed, 31)
        features = compute_log_mel(np.pad(sound, (0, 160)), 80)[:, :3000]
        with torch.inference_mode():
            start = torch.tensor([[tiny_whisper.START]])
            logits = model(torch.from_numpy(features)[None].double(), decoder_input_ids=start).logits[0, 0]
        first = tiny_whisper.FIRST_LANGUAGE
        wanted = tiny_whisper.LANGUAGES[int(logits[first : first + 3].argmax())]
        (result,) = llm.transcribe(sound, TranscriptionOptions(**NO_FALLBACK))
        assert result.language == wanted


def show(result: Transcription) -> tuple[Any, ...]:
    """Without probabilities, whose last digits depend on what shares a step."""
    return result.text, result.language, [(one.start, one.end, list(one.tokens)) for one in result.segments]


def test_several_sounds_at_a_time_and_pieces_are_each_as_alone(llm: LLM) -> None:
    options = TranscriptionOptions(language="de", task="translate", **NO_FALLBACK)
    sounds = [make_sound(seed, seconds) for seed, seconds in ((0, 33), (1, 3), (3, 0.2), (4, 0))]
    together = llm.transcribe(sounds, options)
    assert [show(one) for one in together] == [show(llm.transcribe(sound, options)[0]) for sound in sounds]
    assert together[3] == Transcription("", "de", 0.0, "translate")
    batched = TranscriptionOptions(language="de", task="translate", batched=True, **NO_FALLBACK)
    assert show(llm.transcribe(sounds[1], batched)[0]) == show(together[1])
    (long,) = llm.transcribe(make_sound(5, 70), batched)
    assert [segment.id for segment in long.segments] == list(range(len(long.segments)))
    seeks = [segment.seek for segment in long.segments]
    assert seeks == sorted(seeks) and len(set(seeks)) >= 3 and long.segments[-1].end <= 100
