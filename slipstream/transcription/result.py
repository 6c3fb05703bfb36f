"""A transcript: its segments with times, and how sure the model was of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.output import DraftStats


@dataclass(frozen=True, slots=True)
class Word:
    word: str  # with the space before it, if there is one
    start: float  # seconds
    end: float


@dataclass(frozen=True, slots=True)
class Segment:
    id: int
    seek: int  # the window's begin, in hundredths of a second
    start: float  # seconds
    end: float
    text: str
    tokens: Sequence[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float | None  # None: it did not matter, and was not asked for
    words: Sequence[Word] | None = None  # None: not asked for


@dataclass(frozen=True, slots=True)
class Transcription:
    text: str
    language: str  # the code
    duration: float  # of the sound, in seconds
    task: str
    segments: list[Segment] = field(default_factory=list)
    num_output_tokens: int = 0  # every token that was generated, fallbacks included
    speculation: DraftStats | None = None  # if the engine speculates
