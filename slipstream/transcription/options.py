"""What a caller may say of a transcription."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.errors import RequestError
from slipstream.values import Bounds, describe_value, is_valid_text, read_number

TASKS = ("transcribe", "translate")
FALLBACKS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_TEMPERATURE = Bounds(0.0, 2.0, may_be_none=False)
_THRESHOLD = Bounds(-100.0, 100.0)
_MAX_PROMPT = 1 << 16  # characters


@dataclass(frozen=True, slots=True)
class TranscriptionOptions:
    language: str | None = None  # a code or a name; detected if None
    task: str = "transcribe"  # or "translate", to English
    prompt: str | None = None  # text as if it came before, for names and style
    timestamps: bool = True
    # Tried in turn while a window's text repeats itself or is improbable.
    temperatures: tuple[float, ...] = FALLBACKS
    compression_ratio_threshold: float | None = 2.4
    logprob_threshold: float | None = -1.0
    no_speech_threshold: float | None = 0.6
    no_speech_probs: bool = False  # of every window, which takes a step each; else where the text is doubted
    condition_on_previous_text: bool = True
    batched: bool = False  # pieces of the sound, cut where it is quiet, are transcribed at the same time
    seed: int | None = None
    word_timestamps: bool = False  # a second pass over each window on the CPU

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise RequestError(f"task must be transcribe or translate, not {describe_value(self.task)}")
        given = self.temperatures
        temperatures = (given,) if isinstance(given, int | float) else tuple(given)
        if not 0 < len(temperatures) <= 16:
            raise RequestError("temperatures must be one to sixteen numbers")
        checked = tuple(read_number("temperature", value, _TEMPERATURE) for value in temperatures)
        object.__setattr__(self, "temperatures", checked)
        for name in ("compression_ratio_threshold", "logprob_threshold", "no_speech_threshold"):
            read_number(name, getattr(self, name), _THRESHOLD)
        for name in ("language", "prompt"):
            text = getattr(self, name)
            if text is not None and not (isinstance(text, str) and len(text) <= _MAX_PROMPT and is_valid_text(text)):
                raise RequestError(f"{name} must be a text of at most {_MAX_PROMPT} valid Unicode characters")
