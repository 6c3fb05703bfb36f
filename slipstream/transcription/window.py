"""One window of sound: its text, tried again at higher temperatures while it repeats itself or is improbable."""

from __future__ import annotations

import math
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from slipstream.encoder_input import EncoderInput, EncoderPrompt
from slipstream.output import Completion, DraftStats, RequestOutput
from slipstream.sampling_params import MAX_LOGPROBS, SamplingParams
from slipstream.text.tokenizer import Tokenizer
from slipstream.transcription.options import TranscriptionOptions
from slipstream.transcription.speech_tokens import SpeechTokens

# The weights of attention of a text: [num_heads, num_tokens, num_entries], over so many frames of the window.
Align = Callable[[EncoderInput, Sequence[int], int], Awaitable[npt.NDArray[np.float32]]]
# Runs one request to its end.
Decode = Callable[[EncoderPrompt, SamplingParams], Awaitable[RequestOutput]]
_MOST_LIKELY_LANGUAGE = 100.0  # added to the logits of languages, so that one of them is drawn


@dataclass(frozen=True)
class SpeechModel:
    """What transcribing needs of an engine."""

    decode: Decode
    align: Align
    tokenizer: Tokenizer
    tokens: SpeechTokens
    suppressed: SamplingParams  # the model's own suppressed tokens
    num_bands: int
    window_frames: int  # that the encoder reads at a time
    context_len: int  # of the decoder, in tokens
    max_at_once: int = 64  # windows of a file in the engine


@dataclass(frozen=True, slots=True)
class DecodedWindow:
    token_ids: Sequence[int]  # without the end of the text
    text: str
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float | None  # None: not measured
    num_output_tokens: int
    speculation: DraftStats | None

    def depends_on_speech(self, options: TranscriptionOptions) -> bool:
        """Whether it matters how probable silence is; to know that takes a step."""
        sure = options.logprob_threshold
        is_doubted = options.no_speech_threshold is not None and (sure is None or self.avg_logprob <= sure)
        return is_doubted or options.no_speech_probs

    def is_silence(self, options: TranscriptionOptions) -> bool:
        """Silence is likely, and the text is improbable."""
        threshold, sure = options.no_speech_threshold, options.logprob_threshold
        if threshold is None or self.no_speech_prob is None or self.no_speech_prob <= threshold:
            return False
        return sure is None or self.avg_logprob <= sure

    def needs_fallback(self, options: TranscriptionOptions) -> bool:
        if self.is_silence(options):
            return False
        repeats = options.compression_ratio_threshold
        sure = options.logprob_threshold
        is_repetitive = repeats is not None and self.compression_ratio > repeats
        return is_repetitive or (sure is not None and self.avg_logprob < sure)


@dataclass(frozen=True, slots=True)
class Probe:
    """What the model says after the start token alone."""

    language: str  # the likeliest
    no_speech_prob: float


async def probe_window(model: SpeechModel, features: EncoderInput, earlier: Sequence[int] = ()) -> Probe:
    """One step. The encoder's output is kept for the requests that follow."""
    tokens = model.tokens
    bias = dict.fromkeys(tokens.languages.values(), _MOST_LIKELY_LANGUAGE)
    params = SamplingParams(temperature=0.0, max_tokens=1, logit_bias=bias, ignore_eos=True, logprobs=MAX_LOGPROBS)
    output = await model.decode(EncoderPrompt([*_context(model, earlier), tokens.start], features), params)
    drawn = output.token_ids[0] if output.token_ids else None
    language = next((code for code, token_id in tokens.languages.items() if token_id == drawn), "en")
    entry = (output.outputs[0].logprobs or [{}])[0]
    # Zero if it is not among the likeliest.
    prob = math.exp(entry[tokens.no_speech].logprob) if tokens.no_speech in entry else 0.0
    return Probe(language, prob)


def _context(model: SpeechModel, earlier: Sequence[int]) -> list[int]:
    """Earlier text before the start token, as much as there is room for."""
    return [model.tokens.previous, *earlier[1 - model.context_len // 2 :]] if earlier else []


async def decode_window(
    model: SpeechModel,
    features: EncoderInput,
    earlier: Sequence[int],  # tokens of the text before, if it is to be known
    language: str,
    options: TranscriptionOptions,
) -> DecodedWindow:
    begin = model.tokens.begin(language, options.task, options.timestamps)
    prompt = EncoderPrompt([*_context(model, earlier), *begin], features)
    num_output_tokens, drafts, no_speech_prob = 0, None, None
    for temperature in options.temperatures:
        output = await model.decode(prompt, _make_params(model, options, temperature))
        decoded = _read_output(model, output.outputs[0], temperature)
        num_output_tokens += decoded.num_output_tokens
        drafts = add_drafts(drafts, decoded.speculation)
        if no_speech_prob is None and decoded.depends_on_speech(options):
            no_speech_prob = (await probe_window(model, features, earlier)).no_speech_prob
        decoded = replace(decoded, no_speech_prob=no_speech_prob)
        if not decoded.needs_fallback(options):
            break
    return replace(decoded, num_output_tokens=num_output_tokens, speculation=drafts)


def add_drafts(total: DraftStats | None, more: DraftStats | None) -> DraftStats | None:
    if total is None or more is None:
        return total or more
    count = max(len(total.num_drafts_at), len(more.num_drafts_at))

    def add(one: list[int], other: list[int]) -> list[int]:
        return [sum(values[i] for values in (one, other) if i < len(values)) for i in range(count)]

    return DraftStats(
        total.num_steps + more.num_steps,
        add(total.num_drafts_at, more.num_drafts_at),
        add(total.num_accepted_at, more.num_accepted_at),
        total.is_synthetic,
    )


def _make_params(model: SpeechModel, options: TranscriptionOptions, temperature: float) -> SamplingParams:
    return SamplingParams(
        temperature=temperature,
        max_tokens=model.context_len // 2,
        seed=options.seed,
        suppress_tokens=model.suppressed.suppress_tokens,
        begin_suppress_tokens=model.suppressed.begin_suppress_tokens,
        timestamp_rules=tuple(model.tokens.rules) if options.timestamps else (),
        stop_token_ids=(model.tokens.end_of_text,),
        logprobs=0,
    )


def _read_output(model: SpeechModel, completion: Completion, temperature: float) -> DecodedWindow:
    end = model.tokens.end_of_text
    text = model.tokenizer.decode([token_id for token_id in completion.token_ids if token_id < end]).strip()
    return DecodedWindow(
        [token_id for token_id in completion.token_ids if token_id != end],
        text,
        temperature,
        _mean_logprob(completion),
        measure_compression(text),
        None,
        len(completion.token_ids),
        completion.speculation,
    )


def _mean_logprob(completion: Completion) -> float:
    """Of all tokens, the end of the text among them."""
    entries = zip(completion.token_ids, completion.logprobs or (), strict=False)
    values = [entry[token_id].logprob for token_id, entry in entries]
    return sum(values) / len(values) if values else 0.0


def measure_compression(text: str) -> float:
    """How many times shorter a text becomes: high for one that repeats itself."""
    content = text.encode("utf-8", "replace")
    return len(content) / len(zlib.compress(content))
