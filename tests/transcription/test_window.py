"""One window: fallbacks, silence and prompts, with an engine that answers what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from slipstream.encoder_input import EncoderInput, EncoderPrompt
from slipstream.output import Completion, Logprob, RequestOutput, RequestTimings
from slipstream.sampling_params import SamplingParams
from slipstream.text.tokenizer import Tokenizer
from slipstream.transcription.options import TranscriptionOptions
from slipstream.transcription.speech_tokens import SpeechTokens
from slipstream.transcription.transcriber import cut_segments
from slipstream.transcription.window import DecodedWindow, SpeechModel, decode_window
from tests.transcription.tiny_whisper import (
    END,
    FIRST_LANGUAGE,
    FIRST_TIMESTAMP,
    NO_TIMESTAMPS,
    START,
    make_tokenizer,
)

TOKENIZER = Tokenizer(make_tokenizer(), named_tokens={})
PREVIOUS, NO_SPEECH = NO_TIMESTAMPS - 2, NO_TIMESTAMPS - 1
TRANSCRIBE, TRANSLATE = FIRST_LANGUAGE + 4, FIRST_LANGUAGE + 3
FEATURES = EncoderInput(np.zeros((80, 3000), np.float32))


class ScriptedEngine:
    """Answers with a text and its mean log probability, by temperature, and remembers what it was asked."""

    def __init__(self, answers: dict[float, tuple[str, float]], no_speech_prob: float = 0.0) -> None:
        self.answers, self.no_speech_prob = answers, no_speech_prob
        self.asked: list[tuple[list[int], SamplingParams]] = []

    async def decode(self, prompt: EncoderPrompt, params: SamplingParams) -> RequestOutput:
        self.asked.append((list(prompt.token_ids), params))
        if params.max_tokens == 1:
            ids = [FIRST_LANGUAGE + 1]
            entries = [
                {ids[0]: Logprob(-0.1, 1, ""), NO_SPEECH: Logprob(float(np.log(self.no_speech_prob + 1e-9)), 2, "")}
            ]
        else:
            text, logprob = self.answers[params.temperature or 0.0]
            ids = [FIRST_TIMESTAMP, *TOKENIZER.encode(text, add_special_tokens=False), FIRST_TIMESTAMP + 50, END]
            entries = [{token_id: Logprob(logprob, 1, "")} for token_id in ids]
        completion = Completion(token_ids=ids, finish_reason="stop", logprobs=entries)
        return RequestOutput("r", None, list(prompt.token_ids), [completion], 0, RequestTimings(), True)

    @property
    def temperatures(self) -> list[float]:
        return [params.temperature or 0.0 for _, params in self.asked if params.max_tokens != 1]


def make_model(engine: ScriptedEngine) -> SpeechModel:
    suppressed = SamplingParams(suppress_tokens=(5,), begin_suppress_tokens=(6,))

    async def align(features: EncoderInput, token_ids: Sequence[int], num_frames: int) -> npt.NDArray[np.float32]:
        raise AssertionError("no times of words are asked for")

    return SpeechModel(
        engine.decode, align, TOKENIZER, SpeechTokens.from_tokenizer(TOKENIZER), suppressed, 80, 3000, context_len=448
    )


def decode(
    engine: ScriptedEngine, options: TranscriptionOptions | None = None, earlier: Sequence[int] = ()
) -> DecodedWindow:
    return asyncio.run(decode_window(make_model(engine), FEATURES, earlier, "de", options or TranscriptionOptions()))


GOOD, UNSURE, REPEATED = ("Hello there.", -0.3), ("Hm", -1.5), ("la la la " * 20, -0.1)


@pytest.mark.parametrize(
    ("answers", "no_speech_prob", "temperatures"),
    [
        ({0.0: GOOD}, 0.0, [0.0]),
        ({0.0: REPEATED, 0.2: UNSURE, 0.4: GOOD}, 0.0, [0.0, 0.2, 0.4]),
        (dict.fromkeys((0.0, 0.2, 0.4, 0.6, 0.8, 1.0), UNSURE), 0.5, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        ({0.0: UNSURE}, 0.7, [0.0]),  # improbable because nobody speaks
        ({0.0: GOOD}, 0.7, [0.0]),
    ],
)
def test_fallbacks(answers: dict[float, tuple[str, float]], no_speech_prob: float, temperatures: list[float]) -> None:
    engine = ScriptedEngine(answers, no_speech_prob)
    found = decode(engine)
    assert engine.temperatures == temperatures
    text, logprob = answers[temperatures[-1]]
    assert found.text == text.strip() and found.temperature == temperatures[-1]
    assert found.avg_logprob == pytest.approx(logprob)
    doubted = any(answers[t][1] <= -1 for t in temperatures)
    assert found.no_speech_prob == (pytest.approx(no_speech_prob, abs=1e-6) if doubted else None)
    assert found.is_silence(TranscriptionOptions()) == (no_speech_prob > 0.6 and logprob <= -1)
    assert found.num_output_tokens == sum(
        len(TOKENIZER.encode(answers[t][0], add_special_tokens=False)) + 3 for t in temperatures
    )


def test_thresholds_may_be_off() -> None:
    off = TranscriptionOptions(
        compression_ratio_threshold=None, logprob_threshold=None, no_speech_threshold=None, temperatures=(0.0, 1.0)
    )
    for answer in (REPEATED, UNSURE):
        engine = ScriptedEngine({0.0: answer}, 0.99)
        assert not decode(engine, off).is_silence(off) and engine.temperatures == [0.0]
    silent = replace(off, no_speech_threshold=0.6)
    assert decode(ScriptedEngine({0.0: GOOD}, 0.99), silent).is_silence(silent)


def test_prompts() -> None:
    engine = ScriptedEngine({0.0: GOOD}, 0.25)
    earlier = list(range(10, 250)) * 2
    options = TranscriptionOptions(task="translate", timestamps=False, no_speech_probs=True)
    assert decode(engine, options, earlier).no_speech_prob == pytest.approx(0.25)
    (prompt, params), (probe, probed) = engine.asked
    assert probe == [PREVIOUS, *earlier[-223:], START]
    assert prompt == [*probe, FIRST_LANGUAGE + 1, TRANSLATE, NO_TIMESTAMPS]
    assert set(probed.logit_bias or ()) == set(range(FIRST_LANGUAGE, FIRST_LANGUAGE + 3))
    assert params.timestamp_rules == () and params.suppress_tokens == (5,) and params.begin_suppress_tokens == (6,)
    engine = ScriptedEngine({0.0: GOOD})
    decode(engine)
    ((prompt, params),) = engine.asked
    assert prompt == [START, FIRST_LANGUAGE + 1, TRANSCRIBE]
    assert params.timestamp_rules == (FIRST_TIMESTAMP, NO_TIMESTAMPS, END, FIRST_TIMESTAMP + 50)


def window(ids: list[int]) -> DecodedWindow:
    return DecodedWindow(ids, "", 0.0, -0.1, 1.0, 0.0, len(ids), None)


def time(seconds: float) -> int:
    return FIRST_TIMESTAMP + round(seconds * 50)


T = 70  # some text


@pytest.mark.parametrize(
    ("ids", "spans", "num_done"),
    [
        ([time(0), T, time(2), time(2), T, time(5)], [(10.0, 12.0), (12.0, 15.0)], 3000),  # one time ends it
        ([time(0), T, time(2), time(3), T, time(5), time(5)], [(10.0, 12.0), (13.0, 15.0)], 500),  # a pair does
        ([time(0), T, time(2), time(3), T, T], [(10.0, 12.0)], 200),  # text after the last pair comes again
        ([time(0), T, T], [(10.0, 40.0)], 3000),  # no time at the end
        ([time(0), T, time(4)], [(10.0, 14.0)], 3000),
        ([time(0), time(0), T, time(1)], [(10.0, 11.0)], 3000),  # a segment without text is none
        ([T, T], [(10.0, 40.0)], 3000),  # without times
        ([], [], 3000),
    ],
)
def test_segments(ids: list[int], spans: list[tuple[float, float]], num_done: int) -> None:
    model = make_model(ScriptedEngine({}))
    segments, found = cut_segments(model, window(ids), 1000, 3000)
    assert [(segment.start, segment.end) for segment in segments] == spans and found == num_done
    assert all(segment.seek == 1000 for segment in segments)
