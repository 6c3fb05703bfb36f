"""Sounds of any length: windows that follow each other by their timestamps, or pieces that run at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from slipstream.audio.files import Sound, read_sound
from slipstream.audio.log_mel import FRAMES_PER_SECOND, HOP_LENGTH, SAMPLE_RATE, compute_log_mel
from slipstream.audio.quiet_places import cut_at_quiet_places
from slipstream.encoder_input import EncoderInput
from slipstream.output import DraftStats
from slipstream.transcription.languages import find_language
from slipstream.transcription.options import TranscriptionOptions
from slipstream.transcription.result import Segment, Transcription, Word
from slipstream.transcription.speech_tokens import SECONDS_A_TIMESTAMP
from slipstream.transcription.window import DecodedWindow, SpeechModel, add_drafts, decode_window, probe_window
from slipstream.transcription.word_times import limit_words_at_pauses, merge_punctuation, split_words, time_words

_FRAMES_A_TIMESTAMP = round(SECONDS_A_TIMESTAMP * FRAMES_PER_SECOND)
# Pieces that run at the same time are cut in the last third of a window.
_SEARCHED_SHARE = 3
_FORGETS_ABOVE = 0.5  # text drawn at a higher temperature is no context for the next window
OnSegments = Callable[[Sequence[Segment], float], None]  # new segments, and the share of the sound that is done


@dataclass(frozen=True)
class PreparedSound:
    features: npt.NDArray[np.float32]  # [num_bands, num_frames]
    duration: float
    pieces: Sequence[tuple[int, int]]  # in frames

    @property
    def num_frames(self) -> int:
        return int(self.features.shape[1])


def prepare_sound(sound: Sound, name: str, model: SpeechModel, is_batched: bool) -> PreparedSound:
    """Decoding and features: work of a processor, without the engine."""
    samples = read_sound(sound, name)
    window = model.window_frames * HOP_LENGTH
    num_frames = -(-len(samples) // HOP_LENGTH)
    # A frame of silence follows, which the last frame of the sound reaches into.
    padded = np.pad(samples, (0, (num_frames + 1) * HOP_LENGTH - len(samples)))
    pieces = [(0, num_frames)]
    if is_batched:
        cuts = cut_at_quiet_places(samples, window, window // _SEARCHED_SHARE)
        pieces = [(begin // HOP_LENGTH, -(-end // HOP_LENGTH)) for begin, end in cuts]
    features = compute_log_mel(padded, model.num_bands)[:, :num_frames]
    return PreparedSound(features, len(samples) / SAMPLE_RATE, pieces)


@dataclass
class _Piece:
    """A range of the sound, transcribed from its begin to its end."""

    end: int
    seek: int  # the next window's begin, in frames
    earlier: list[int]  # tokens of the text before
    segments: list[Segment] = field(default_factory=list)  # their ids count from the piece's begin
    num_output_tokens: int = 0
    speculation: DraftStats | None = None


async def transcribe_sound(
    model: SpeechModel,
    sound: PreparedSound,
    options: TranscriptionOptions,
    on_segments: OnSegments | None = None,
) -> Transcription:
    language = await _choose_language(model, sound, options)
    transcript = _Transcript(sound, on_segments)
    limit = asyncio.Semaphore(model.max_at_once)
    prompt = _encode_prompt(model, options)

    async def run(idx: int) -> None:
        begin, end = sound.pieces[idx]
        async with limit:
            piece = _Piece(end, begin, list(prompt))
            while piece.seek < piece.end:
                await _transcribe_window(model, sound, piece, language, options)
                transcript.update(idx, piece)

    async with asyncio.TaskGroup() as group:
        for idx in range(len(sound.pieces)):
            group.create_task(run(idx))
    segments, pieces = transcript.segments, transcript.pieces.values()
    drafts = None
    for piece in pieces:
        drafts = add_drafts(drafts, piece.speculation)
    text = "".join(segment.text for segment in segments).strip()
    num_tokens = sum(piece.num_output_tokens for piece in pieces)
    return Transcription(text, language, sound.duration, options.task, segments, num_tokens, drafts)


class _Transcript:
    """The pieces as far as they are transcribed, and their segments in order."""

    def __init__(self, sound: PreparedSound, on_segments: OnSegments | None) -> None:
        self._sound = sound
        self._on_segments = on_segments
        self.pieces: dict[int, _Piece] = {}
        self.segments: list[Segment] = []
        self._next = 0  # the piece whose segments come next
        self._num_told = 0  # of its segments

    def update(self, idx: int, piece: _Piece) -> None:
        """A window of a piece was transcribed: the segments that have all others before them are final."""
        self.pieces[idx] = piece
        first = len(self.segments)
        while (own := self.pieces.get(self._next)) is not None:
            for segment in own.segments[self._num_told :]:
                self.segments.append(replace(segment, id=len(self.segments)))
            self._num_told = len(own.segments)
            if own.seek < own.end:
                break
            self._next, self._num_told = self._next + 1, 0
        if self._on_segments is not None:
            left = sum(own.end - own.seek for own in self.pieces.values() if own.seek < own.end)
            left += sum(end - begin for i, (begin, end) in enumerate(self._sound.pieces) if i not in self.pieces)
            self._on_segments(self.segments[first:], 1.0 - left / self._sound.num_frames)


async def _choose_language(model: SpeechModel, sound: PreparedSound, options: TranscriptionOptions) -> str:
    if options.language is not None:
        return find_language(options.language, model.tokens.languages or ("en",))
    if not model.tokens.languages:
        return "en"
    return (await probe_window(model, _window_at(model, sound, 0, sound.num_frames))).language


def _encode_prompt(model: SpeechModel, options: TranscriptionOptions) -> list[int]:
    text = (options.prompt or "").strip()
    return model.tokenizer.encode(f" {text}", add_special_tokens=False) if text else []


def _window_at(model: SpeechModel, sound: PreparedSound, begin: int, end: int) -> EncoderInput:
    """A window from a frame on, filled up with zeros after a piece's end, as openai/whisper fills it."""
    frames = np.zeros((model.num_bands, model.window_frames), np.float32)
    own = sound.features[:, begin : min(end, begin + model.window_frames)]
    frames[:, : own.shape[1]] = own
    return EncoderInput(frames)


async def _transcribe_window(
    model: SpeechModel, sound: PreparedSound, piece: _Piece, language: str, options: TranscriptionOptions
) -> None:
    features = _window_at(model, sound, piece.seek, piece.end)
    decoded = await decode_window(model, features, piece.earlier, language, options)
    piece.num_output_tokens += decoded.num_output_tokens
    piece.speculation = add_drafts(piece.speculation, decoded.speculation)
    num_frames = min(model.window_frames, piece.end - piece.seek)
    if decoded.is_silence(options):
        piece.seek += num_frames
        return
    new, num_done = cut_segments(model, decoded, piece.seek, num_frames)
    if options.word_timestamps:
        new = await add_words(model, new, features, num_frames, (language, options.task))
    piece.segments += new
    if not options.condition_on_previous_text or decoded.temperature > _FORGETS_ABOVE:
        piece.earlier.clear()
    else:
        piece.earlier += [token_id for segment in new for token_id in segment.tokens]
    piece.seek += num_done


async def add_words(
    model: SpeechModel, segments: Sequence[Segment], features: EncoderInput, num_frames: int, said: tuple[str, str]
) -> list[Segment]:
    """The segments of one window with their words; what is ``said`` is a language and a task."""
    tokens, language = model.tokens, said[0]
    texts = [[token_id for token_id in one.tokens if token_id < tokens.end_of_text] for one in segments]
    words = [split_words(text, model.tokenizer, language) for text in texts]
    begin = tokens.begin(*said, with_timestamps=False)
    if not any(words) or len(begin) + sum(map(len, texts)) >= model.context_len:
        return [replace(segment, words=()) for segment in segments]
    together = [word for own in words for word in own]
    token_ids = [*begin, *(token_id for text in texts for token_id in text), tokens.end_of_text]
    weights = await model.align(features, token_ids, num_frames)
    time_words(weights, len(begin) - 1, together)
    limit_words_at_pauses(together)
    return [
        replace(
            segment,
            words=[
                Word(word.text, *(round(segment.seek / FRAMES_PER_SECOND + time, 2) for time in (word.start, word.end)))
                for word in merge_punctuation(own)
            ],
        )
        for segment, own in zip(segments, words, strict=True)
    ]


def cut_segments(model: SpeechModel, decoded: DecodedWindow, seek: int, num_frames: int) -> tuple[list[Segment], int]:
    """The segments of a window's text, and how many of its frames they cover.

    Two timestamps in a row end one segment and begin the next. Text after the last pair is cut off by the window: it
    is transcribed again from there, unless one timestamp ends it.
    """
    tokens, ids = model.tokens, list(decoded.token_ids)
    is_time = [token_id >= tokens.first_timestamp for token_id in ids]
    cuts = [i for i in range(1, len(ids)) if is_time[i] and is_time[i - 1]]
    offset = seek / FRAMES_PER_SECOND
    length = num_frames / FRAMES_PER_SECOND
    ends_with_one = is_time[-2:] == [False, True]
    if not cuts:
        times = [token_id for token_id in ids if token_id >= tokens.first_timestamp]
        last = tokens.seconds_of(times[-1]) if times and times[-1] != tokens.first_timestamp else length
        spans = [(0.0, min(last, length), ids)]
        num_done = num_frames
    else:
        cuts += [len(ids)] if ends_with_one else []
        parts = [ids[begin:end] for begin, end in zip([0, *cuts], cuts, strict=False)]
        spans = [(tokens.seconds_of(part[0]), tokens.seconds_of(part[-1]), part) for part in parts]
        last_frame = (ids[cuts[-1] - 1] - tokens.first_timestamp) * _FRAMES_A_TIMESTAMP
        num_done = num_frames if ends_with_one or not 0 < last_frame < num_frames else last_frame
    return [
        segment
        for start, end, part in spans
        if (segment := _make_segment(model, decoded, seek, (offset + start, offset + end), part)) is not None
    ], num_done


def _make_segment(
    model: SpeechModel, decoded: DecodedWindow, seek: int, span: tuple[float, float], ids: Sequence[int]
) -> Segment | None:
    """None where there is no text, or no time for it."""
    text = model.tokenizer.decode([token_id for token_id in ids if token_id < model.tokens.end_of_text])
    start, end = (round(value, 2) for value in span)
    if not text.strip() or start == end:
        return None
    return Segment(
        0,
        seek,
        start,
        end,
        text,
        ids,
        decoded.temperature,
        decoded.avg_logprob,
        decoded.compression_ratio,
        decoded.no_speech_prob,
    )
