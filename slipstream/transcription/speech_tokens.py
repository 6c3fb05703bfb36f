"""The tokens by which a Whisper model is told what to do, and tells times."""

from __future__ import annotations

import re
from dataclasses import dataclass

from slipstream.errors import RequestError
from slipstream.sampling.timestamp_rules import Rules
from slipstream.text.tokenizer import Tokenizer

SECONDS_A_TIMESTAMP = 0.02
_LATEST_INITIAL = 50  # the first time of a window is at most one second
_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
_END_OF_GPT2 = 50256  # models for English alone have this vocabulary, with the others' tokens for tasks after it


@dataclass(frozen=True)
class SpeechTokens:
    end_of_text: int
    start: int
    previous: int  # before earlier text
    no_speech: int
    no_timestamps: int
    tasks: dict[str, int]
    languages: dict[str, int]  # by code; empty of a model for English alone

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> SpeechTokens:
        def find(*names: str) -> int:
            for name in names:
                if (token_id := tokenizer.token_id(f"<|{name}|>")) is not None:
                    return token_id
            raise RequestError(f"this model's vocabulary has no token <|{names[0]}|>, so it cannot transcribe speech")

        end, start = find("endoftext"), find("startoftranscript")
        tasks = {name: find(name) for name in ("transcribe", "translate")}
        languages = {}
        if end != _END_OF_GPT2:
            for token_id in range(start + 1, min(tasks.values())):
                if match := _LANGUAGE.fullmatch(tokenizer.token(token_id)):
                    languages[match[1]] = token_id
        no_speech = find("nospeech", "nocaptions")
        return cls(end, start, find("startofprev"), no_speech, find("notimestamps"), tasks, languages)

    @property
    def first_timestamp(self) -> int:
        return self.no_timestamps + 1

    @property
    def rules(self) -> Rules:
        latest = self.first_timestamp + _LATEST_INITIAL
        return Rules(self.first_timestamp, self.no_timestamps, self.end_of_text, latest)

    def begin(self, language: str | None, task: str, with_timestamps: bool) -> list[int]:
        """What every output begins with."""
        ids = [self.start]
        if language is not None and self.languages:
            ids += [self.languages[language], self.tasks[task]]
        return ids if with_timestamps else [*ids, self.no_timestamps]

    def seconds_of(self, token_id: int) -> float:
        """Of a timestamp, from the window's begin."""
        return (token_id - self.first_timestamp) * SECONDS_A_TIMESTAMP
