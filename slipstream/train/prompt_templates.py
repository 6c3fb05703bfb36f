"""Prompt templates: the first words of turns and documents, which the target continues, and tasks about a text.

They are in ``prompt_templates.txt``; none is taken from a data set. Fields in braces are filled by ``fillers.py``. No
template ends in a space, because the next token brings its own.
"""

from __future__ import annotations

from pathlib import Path


def _read_sections(path: Path) -> dict[str, tuple[str, ...]]:
    """Templates by the title in brackets above them."""
    sections: dict[str, list[str]] = {}
    templates: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            templates = sections[line.strip("[]")] = []
        elif line and not line.startswith(";"):
            templates.append(line.replace("\\n", "\n"))
    return {title: tuple(templates) for title, templates in sections.items()}


_SECTIONS = _read_sections(Path(__file__).with_name("prompt_templates.txt"))
# One tuple for each kind of request.
OPENERS = tuple(templates for title, templates in _SECTIONS.items() if title.startswith("openers: "))
PLAIN_OPENERS = _SECTIONS["plain openers"]
DOCUMENTS = _SECTIONS["documents"]
FOREIGN_DOCUMENTS = _SECTIONS["foreign documents"]
FOLLOW_UPS = _SECTIONS["follow-ups"]
LONG_TASKS = _SECTIONS["long tasks"]
TRANSLATIONS = _SECTIONS["translations"]
QUESTIONS = _SECTIONS["questions"]
NAMES = _SECTIONS["names"]
