"""What texts begin with and what is asked of them, from ``phrases.txt``. None is taken from a data set.

Places in braces are filled by ``words.py``. Nothing ends in a space, which the next token brings along.
"""

from __future__ import annotations

from pathlib import Path


def _read_sections(path: Path) -> dict[str, tuple[str, ...]]:
    """Phrases by the title in brackets above them."""
    sections: dict[str, list[str]] = {}
    phrases: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            phrases = sections[line.strip("[]")] = []
        elif line and not line.startswith(";"):
            phrases.append(line.replace("\\n", "\n"))
    return {title: tuple(phrases) for title, phrases in sections.items()}


_SECTIONS = _read_sections(Path(__file__).with_name("phrases.txt"))
# One tuple for each kind of request.
OPENERS = tuple(phrases for title, phrases in _SECTIONS.items() if title.startswith("openers: "))
PLAIN_OPENERS = _SECTIONS["plain openers"]
DOCUMENTS = _SECTIONS["documents"]
FOREIGN_DOCUMENTS = _SECTIONS["foreign documents"]
FOLLOW_UPS = _SECTIONS["follow-ups"]
LONG_TASKS = _SECTIONS["long tasks"]
TRANSLATIONS = _SECTIONS["translations"]
QUESTIONS = _SECTIONS["questions"]
NAMES = _SECTIONS["names"]
