"""The questions of Spec-Bench, read and checked: one JSON a line, with a category and one or two turns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from slipstream.errors import ConfigError, nearest

# Kinds as the paper counts them: MT-bench's eight are one.
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


class Question(NamedTuple):
    kind: str
    turns: tuple[str, ...]


def read_questions(path: Path, limit: int | None = None, kinds: Sequence[str] = ()) -> dict[str, list[Question]]:
    """By kind, in the file's order; the first ``limit`` of each, of the kinds named or of all."""
    found: dict[str, list[Question]] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the questions: {error}; give Spec-Bench's question.jsonl") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            question = _question(line, f"{path}, line {number}")
            found.setdefault(question.kind, []).append(question)
    if not found:
        raise ConfigError(f"{path} has no questions")
    if unknown := [kind for kind in kinds if kind not in found]:
        raise ConfigError(f"{path} has no questions of kind '{unknown[0]}'{nearest(unknown[0], found)}")
    return {kind: asked[:limit] for kind, asked in found.items() if not kinds or kind in kinds}


def _question(line: str, location: str) -> Question:
    try:
        asked = json.loads(line)
        kind, turns = asked["category"], asked["turns"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{location} is no question with category and turns") from error
    are_turns = isinstance(turns, list) and 1 <= len(turns) <= 2 and all(isinstance(turn, str) for turn in turns)
    if not isinstance(kind, str) or not are_turns:
        raise ConfigError(f"{location}: category must be a word and turns one or two texts")
    return Question("mt_bench" if kind in MT_BENCH else kind, tuple(turns))
