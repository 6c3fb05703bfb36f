"""What the target is asked: files of prompts, and forms in which it writes both sides of a conversation itself."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from slipstream.errors import ConfigError, RequestError
from slipstream.models.tokenizer import Tokenizer

# First words of requests. Half of the turns begin with one, for a small model left alone keeps to few subjects.
OPENERS = (
    *("Write a short story about", "Write a Python function that", "Write an email to", "Write a poem about"),
    *("Explain how", "Explain the difference between", "Explain to a child why", "Describe", "Summarize the"),
    *("What is", "What are the", "What would happen if", "How do I", "How can I", "How does", "Why is", "Why do"),
    *("Who was", "When did", "Where is", "Give me a list of", "Give three examples of", "List the steps to"),
    *("Can you help me", "Compare", "Translate into French:", "Fix this code:", "I need advice on", "Solve:"),
    *("Translate to English:", "Translate this into Spanish:", "A shop sells", "If I have", "Calculate", "Classify"),
    *("Rewrite this sentence:", "Create a plan for", "Imagine you are", "Is it true that", "Tell me about"),
)
PLAIN_OPENERS = ("The", "In", "A", "When", "It was", "There is", "How to", "Once", "We", "This", "I", "#", "def", "1.")
FOLLOW_UPS = (
    *("Can you give an example?", "Make it shorter.", "Why is that?", "Explain it in simpler words.", "Go on."),
    *("Rewrite it as a list.", "What are the disadvantages?", "Are you sure?", "Say that again in other words."),
)
# Of a text, and one of the questions that it answers.
LONG_TASKS = (
    "Summarize the following text.\n\n{text}",
    "Summarize: {text}",
    "{text}\n\nSummarize the text above in a few sentences.",
    "Repeat the following text word for word.\n\n{text}",
    "Quote the most important sentences of this text:\n\n{text}",
    "Continue this text:\n\n{text}",
    "{text}\n\nWhat is the text above about?",
    "{text}\n\n{question}",
    "Answer with what this text says.\n\n{text}\n\nQuestion: {question}",
)
_MARK = "a1turn2of3the4user"


class Opening(NamedTuple):
    """The beginning of a text that the target is to write on."""

    token_ids: list[int]
    words: str  # those at its end that belong to the turn already


class Form(Protocol):
    """How turns become a prompt."""

    begin: int  # tokens that stand before the first turn
    # What ends a user's turn, besides the end of sequence: a token, or a text where the template has none.
    stop_ids: tuple[int, ...]
    stop: tuple[str, ...]

    def opening(self, generator: random.Random) -> Opening: ...

    def prompt(self, turns: Sequence[str]) -> list[int]:
        """Turns alternate, beginning and ending with the user's."""
        ...


class ChatForm:
    """The model's own chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        text = tokenizer.render_chat([{"role": "user", "content": _MARK}], add_generation_prompt=False)
        before, mark, after = text.partition(_MARK)
        if not mark:
            raise RequestError("the chat template does not show a user's words")
        self._before = before
        self.begin = len(tokenizer.encode(before, add_special_tokens=False))
        ids = tokenizer.encode(after.strip(), add_special_tokens=False)
        by_token = bool(ids) and ids[0] in tokenizer.special_token_ids
        self.stop_ids: tuple[int, ...] = (ids[0],) if by_token else ()
        self.stop: tuple[str, ...] = (after.strip(),) if ids and not by_token else ()

    def opening(self, generator: random.Random) -> Opening:
        words = generator.choice(OPENERS) if generator.random() < 0.5 else ""
        return Opening(self._tokenizer.encode(self._before + words, add_special_tokens=False), words)

    def prompt(self, turns: Sequence[str]) -> list[int]:
        roles = ("user", "assistant")
        return self._tokenizer.encode_chat([{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)])


class PlainForm:
    """For a model without a template: texts that go on."""

    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.begin = len(tokenizer.encode(""))

    def opening(self, generator: random.Random) -> Opening:
        words = generator.choice(PLAIN_OPENERS)
        return Opening(self._tokenizer.encode(words), words)

    def prompt(self, turns: Sequence[str]) -> list[int]:
        return self._tokenizer.encode("\n\n".join(turns))


def form_of(tokenizer: Tokenizer) -> tuple[Form, str | None]:
    """The form, and a line for the user where it is not the model's own."""
    if not tokenizer.has_chat_template:
        return PlainForm(tokenizer), "the model has no chat template: it continues plain texts instead"
    try:
        return ChatForm(tokenizer), None
    except RequestError as error:
        return PlainForm(tokenizer), f"{error}: plain texts are continued instead"


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


def _turns(line: str, place: str) -> list[str]:
    try:
        entry: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place} is not JSON; write one object a line") from error
    if isinstance(entry, str):
        entry = {"prompt": entry}
    if not isinstance(entry, dict) or ("prompt" in entry) == ("turns" in entry):
        raise ConfigError(f'{place} must be an object with "prompt" or "turns"')
    turns = entry["turns"] if "turns" in entry else [entry["prompt"]]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ConfigError(f"{place} must have texts that are not empty")
    return [turn.strip() for turn in turns]
