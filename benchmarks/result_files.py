"""Result files read back: checked, newest first. ``slipstream/commands/results.py`` writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from slipstream.commands.results import Row, slug
from slipstream.errors import ConfigError

_DATE = re.compile(r"^\d{4}-\d\d-\d\d(T\d\d-\d\d-\d\d)?-")


@dataclass(frozen=True)
class Result:
    """One run of a benchmark."""

    path: Path
    kind: str  # what the file's name says between its date and its hardware
    hardware: str
    date: str
    rows: list[Row]


def read_result(path: Path) -> Result:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no result file: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is no result file: not an object")
    if missing := [name for name in ("hardware", "date") if not isinstance(found.get(name), str)]:
        raise ConfigError(f"{path} is no result file: no {missing[0]}")
    rows = found.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) and {"case", "batch"} <= row.keys() for row in rows):
        raise ConfigError(f"{path} is no result file: rows must be a list of objects with case and batch")
    kind = _DATE.sub("", path.stem).partition(f"-{slug(found['hardware'])}")[0]
    return Result(path, kind, found["hardware"], found["date"], rows)


def newest_first(paths: Iterable[Path]) -> list[Result]:
    """By the date inside; of one date by name."""
    return sorted(map(read_result, paths), key=lambda result: (result.date, result.path.name), reverse=True)


def select(results: Iterable[Result], kind: str, hardware: str) -> list[Result]:
    """Of one benchmark on one machine, in their order. A benchmark may add a model's name to its kind."""
    return [r for r in results if r.hardware == hardware and (r.kind == kind or r.kind.startswith(f"{kind}-"))]
