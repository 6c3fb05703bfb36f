"""Request bodies with prompts of random words or ids, from a data set, or with the lengths of a trace.

A workload returns the request of any index, so that each process builds its own requests, and the same seed gives the
same requests however many processes there are.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from slipstream.errors import ConfigError
from slipstream.load.words import WORDS

# Indices from here on are for warming up, so that no warm-up request equals a measured one.
FIRST_WARMUP = 1 << 40
# Mooncake's traces give ids of blocks of this many tokens that prompts share.
_BLOCK_LEN = 512

Message = dict[str, Any]


class Asked(NamedTuple):
    """One request, independent of the API."""

    prompt: str | list[int] | list[Message]  # text, token ids or a conversation
    max_tokens: int


class Workload(Protocol):
    def request(self, idx: int) -> Asked: ...


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Prompts of random words or token ids; the first ``prefix_len`` of them are the same in every prompt."""

    seed: str
    prompt_len: int
    output_len: int
    spread: float = 0.0  # lengths are uniform from this fraction below to this fraction above
    prefix_len: int = 0
    vocab_size: int | None = None  # token ids below it instead of words

    def request(self, idx: int) -> Asked:
        generator = random.Random(f"{self.seed}/{idx}")
        prompt_len = max(self.prefix_len + 1, self._length(generator, self.prompt_len))
        output_len = self._length(generator, self.output_len)
        prefix = random.Random(f"{self.seed}/prefix")
        if self.vocab_size is not None:
            ids = [prefix.randrange(self.vocab_size) for _ in range(self.prefix_len)]
            ids += [generator.randrange(self.vocab_size) for _ in range(prompt_len - self.prefix_len)]
            return Asked(ids, output_len)
        words = prefix.choices(WORDS, k=self.prefix_len) + generator.choices(WORDS, k=prompt_len - self.prefix_len)
        return Asked(" ".join(words), output_len)

    def _length(self, generator: random.Random, mean: int) -> int:
        if not self.spread:
            return mean
        return max(1, generator.randint(round(mean * (1 - self.spread)), round(mean * (1 + self.spread))))


@dataclass(frozen=True, slots=True)
class DataSet:
    """Requests read from a file, again from its beginning when there are more requests than lines."""

    asked: tuple[Asked, ...]

    def request(self, idx: int) -> Asked:
        return self.asked[(idx - FIRST_WARMUP if idx >= FIRST_WARMUP else idx) % len(self.asked)]


class TraceEntry(NamedTuple):
    at: float  # seconds after the first one
    asked: Asked | None  # None: random words with these lengths
    prompt_len: int = 0
    output_len: int = 0
    blocks: tuple[int, ...] = ()  # ids of the prompt's first blocks; prompts that share ids share text


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of a trace, with prompts of random words where it gives only lengths."""

    entries: tuple[TraceEntry, ...]
    seed: str

    def request(self, idx: int) -> Asked:
        is_warmup = idx >= FIRST_WARMUP
        entry = self.entries[(idx - FIRST_WARMUP if is_warmup else idx) % len(self.entries)]
        if entry.asked is not None:
            return entry.asked
        words: list[str] = []
        for block in () if is_warmup else entry.blocks:
            words += random.Random(f"{self.seed}/block/{block}").choices(WORDS, k=_BLOCK_LEN)
        words = words[: entry.prompt_len]
        words += random.Random(f"{self.seed}/{idx}").choices(WORDS, k=entry.prompt_len - len(words))
        return Asked(" ".join(words), entry.output_len)


@dataclass(frozen=True, slots=True)
class BodyFormat:
    """How a request is encoded for the server."""

    api: str  # chat or completions
    model: str
    temperature: float
    ignore_eos: bool
    include_usage: bool
    extra: dict[str, Any] = field(default_factory=dict)  # null removes a field

    def encode(self, asked: Asked) -> bytes:
        fields: dict[str, Any] = {"model": self.model, self._prompt_name: self._prompt(asked.prompt)}
        fields |= {"max_tokens": asked.max_tokens, "temperature": self.temperature, "stream": True}
        if self.include_usage:
            fields["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        fields |= self.extra
        return json.dumps({name: value for name, value in fields.items() if value is not None}).encode()

    @property
    def _prompt_name(self) -> str:
        return "messages" if self.api == "chat" else "prompt"

    def _prompt(self, prompt: str | list[int] | list[Message]) -> Any:
        if self.api == "chat":
            return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            return "\n\n".join(str(message.get("content") or "") for message in prompt if isinstance(message, dict))
        return prompt


def read_data_set(path: Path, output_len: int) -> DataSet:
    """JSONL of ``messages``, ``prompt`` or Spec-Bench's ``turns`` (the first one), and in any line ``max_tokens``."""
    return DataSet(tuple(_asked(entry, location, output_len) for entry, location in read_lines(path, "--dataset")))


def read_lines(path: Path, option: str) -> Iterator[tuple[dict[str, Any], str]]:
    """The objects of a JSONL file with their locations."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} cannot be read: {error}") from error
    found = False
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        location = f"{path}, line {number}"
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{location} is not JSON ({error})") from error
        if not isinstance(entry, dict):
            raise ConfigError(f"{location} is no JSON object")
        found = True
        yield entry, location
    if not found:
        raise ConfigError(f"{path} has no requests")


def _asked(entry: dict[str, Any], location: str, output_len: int) -> Asked:
    prompt = find_prompt(entry, location)
    if prompt is None:
        raise ConfigError(f"{location} has neither messages nor prompt nor turns")
    return Asked(prompt, positive(entry.get("max_tokens", output_len), "max_tokens", location))


def find_prompt(entry: dict[str, Any], location: str) -> str | list[Message] | None:
    """The prompt in an entry of a data set or trace; None if it has none."""
    if (messages := entry.get("messages")) is not None:
        if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
            raise ConfigError(f"{location}: messages must be a list of objects")
        return messages
    text = entry.get("prompt")
    if text is None and (turns := entry.get("turns")) is not None:
        if not isinstance(turns, list) or not turns:
            raise ConfigError(f"{location}: turns must be a list of texts")
        text = turns[0]
    if text is not None and (not isinstance(text, str) or not text):
        raise ConfigError(f"{location}: the prompt must be a text")
    return text


def positive(value: Any, name: str, location: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{location}: {name} must be a positive integer, not {value!r}")
    return value
