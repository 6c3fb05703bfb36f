"""Prompts for the target: files of given prompts, and formats in which it writes both sides of a conversation."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from slipstream.errors import ConfigError, RequestError
from slipstream.text.tokenizer import Tokenizer
from slipstream.train.fillers import Fillers
from slipstream.train.prompt_templates import OPENERS, PLAIN_OPENERS

_MARK = "a1turn2of3the4user"
_NO_OPENER, _OPENER_ALONE = 0.25, 0.25  # shares of turns; the others have random words after their opener


class Opening(NamedTuple):
    """The beginning of a text that the target continues."""

    token_ids: list[int]
    text: str  # the part of it that belongs to the turn


class PromptFormat(Protocol):
    """How turns become a prompt."""

    begin: int  # tokens before the first turn
    # What ends a user's turn, besides the end of sequence: a token, or a stop string where the template has none.
    stop_ids: tuple[int, ...]
    stop: tuple[str, ...]

    def opening(self, generator: random.Random, fillers: Fillers) -> Opening: ...

    def prompt(self, turns: Sequence[str]) -> list[int]:
        """Turns alternate, beginning and ending with the user's."""
        ...


class ChatPromptFormat:
    """The model's own chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        text = tokenizer.render_chat([{"role": "user", "content": _MARK}], add_generation_prompt=False)
        before, mark, after = text.partition(_MARK)
        if not mark:
            raise RequestError("the chat template does not show the user's message")
        self._before = before
        self.begin = len(tokenizer.encode(before, add_special_tokens=False))
        ids = tokenizer.encode(after.strip(), add_special_tokens=False)
        by_token = bool(ids) and ids[0] in tokenizer.special_token_ids
        self.stop_ids: tuple[int, ...] = (ids[0],) if by_token else ()
        self.stop: tuple[str, ...] = (after.strip(),) if ids and not by_token else ()

    def opening(self, generator: random.Random, fillers: Fillers) -> Opening:
        kind = generator.random()
        given = ""
        if kind >= _NO_OPENER:
            given = _opener(generator, fillers, generator.choice(OPENERS), kind >= _NO_OPENER + _OPENER_ALONE)
        return Opening(self._tokenizer.encode(self._before + given, add_special_tokens=False), given)

    def prompt(self, turns: Sequence[str]) -> list[int]:
        roles = ("user", "assistant")
        return self._tokenizer.encode_chat([{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)])


class PlainPromptFormat:
    """For a model without a chat template: plain text to continue."""

    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.begin = len(tokenizer.encode(""))

    def opening(self, generator: random.Random, fillers: Fillers) -> Opening:
        given = _opener(generator, fillers, PLAIN_OPENERS, generator.random() >= 0.5)
        return Opening(self._tokenizer.encode(given), given)

    def prompt(self, turns: Sequence[str]) -> list[int]:
        return self._tokenizer.encode("\n\n".join(turns))


def _opener(generator: random.Random, fillers: Fillers, openers: Sequence[str], more: bool) -> str:
    return fillers.fill(generator, openers, generator.choice((1, 1, 2)) if more else 0)


def choose_prompt_format(tokenizer: Tokenizer) -> tuple[PromptFormat, str | None]:
    """The format, and a line for the user where it is not the model's own chat template."""
    if not tokenizer.has_chat_template:
        return PlainPromptFormat(tokenizer), "the model has no chat template: the target continues plain texts instead"
    try:
        return ChatPromptFormat(tokenizer), None
    except RequestError as error:
        return PlainPromptFormat(tokenizer), f"{error}: the target continues plain texts instead"


def read_prompts(path: Path) -> list[list[str]]:
    """The user's turns of each conversation: a line each, or JSONL with ``prompt`` or ``turns``."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"--prompts {path} cannot be read ({reason}); check the path") from error
    numbered = [(i, line.strip()) for i, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ConfigError(f"--prompts {path} is empty; put a prompt on each line, or leave the option out")
    if path.suffix.lower() in (".jsonl", ".json"):
        return [_turns(line, f"{path}, line {i},") for i, line in numbered]
    return [[line] for _, line in numbered]


def _turns(line: str, location: str) -> list[str]:
    try:
        entry: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{location} is not JSON; write one object a line") from error
    if isinstance(entry, str):
        entry = {"prompt": entry}
    if not isinstance(entry, dict) or ("prompt" in entry) == ("turns" in entry):
        raise ConfigError(f'{location} must be an object with "prompt" or "turns"')
    turns = entry["turns"] if "turns" in entry else [entry["prompt"]]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ConfigError(f"{location} must hold texts that are not empty")
    return [turn.strip() for turn in turns]
