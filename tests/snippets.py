"""Commands and programs in the pages that people read: found, and told apart."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        ROOT / "benchmarks" / "README.md",
        ROOT / "examples" / "README.md",
        *(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "log"),
    ]
)
PROGRAMS = ("slipstream", "make", "pip", "python", "pytest", "git", "docker")
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")


class Program(NamedTuple):
    """A fenced block of Python."""

    page: Path
    line: int
    text: str


class Command(NamedTuple):
    page: Path
    line: int
    words: tuple[str, ...]
    in_sentence: bool  # there it may leave out what it is not about


def programs() -> list[Program]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in _FENCE.finditer(text):
            if match[2] == "python":
                body = re.sub(rf"^{match[1]}", "", match[3], flags=re.MULTILINE)
                found.append(Program(page, text.count("\n", 0, match.start()) + 1, body))
    return found


def commands() -> list[Command]:
    """Lines of fenced blocks without a language, and code within a sentence, that begin with a known program."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in _FENCE.finditer(text):
            if not match[2]:
                line = text.count("\n", 0, match.start()) + 2
                found += [Command(page, line + i, words, False) for i, words in _lines(match[3])]
        for match in _INLINE.finditer(_FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)):
            words = _words(match[1].replace("\n", " "))
            if len(words) > 1:  # a program's name alone is no command
                found.append(Command(page, text.count("\n", 0, match.start()) + 1, words, True))
    return found


def _lines(block: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    joined = block.replace("\\\n", "\0")
    for i, line in enumerate(joined.split("\n")):
        if words := _words(line.replace("\0", " ")):
            yield i, words


def _words(line: str) -> tuple[str, ...]:
    """Of one command, without redirections and comments; none where it is no command."""
    line = line.strip().removeprefix("!")
    if line.split(" ")[0] not in PROGRAMS:
        return ()
    words = shlex.split(line, comments=True)
    for sign in ("<", ">", "|", "&&"):
        words = words[: words.index(sign)] if sign in words else words
    return tuple(words)
