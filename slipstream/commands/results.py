"""The result file of a benchmark: one JSON file per run, with the hardware and versions beside the figures.

The schema is described in ``benchmarks/README.md``. Used by ``slipstream bench`` and by the benchmark scripts.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slipstream import __version__
from slipstream.commands.machine import describe_hardware
from slipstream.config import writable_folder
from slipstream.errors import ConfigError

Row = dict[str, Any]  # at least case and batch


@dataclass(frozen=True, slots=True)
class Results:
    """One run of a benchmark, as written to its file."""

    hardware: str
    torch: str
    commit: str | None  # None outside a checkout
    dirty: bool | None  # whether tracked files differ from the commit
    date: str  # ISO 8601, UTC
    slipstream: str
    rows: list[Row]

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"


def collect_results(rows: Sequence[Row], *, device: str = "cpu") -> Results:
    """Combine rows with the machine, the versions and the time."""
    for row in rows:
        if missing := {"case", "batch"} - row.keys():
            raise ValueError(f"a row lacks {', '.join(sorted(missing))}")
    commit, dirty = _checkout()
    return Results(
        hardware=describe_hardware(device),
        torch=importlib.metadata.version("torch"),
        commit=commit,
        dirty=dirty,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        slipstream=__version__,
        rows=list(rows),
    )


def prepare_folder(folder: Path) -> Path:
    return writable_folder(folder, "results to", "--output-dir")


def write_results(results: Results, folder: Path, case: str) -> Path:
    """Write a new file ``<date>-<case>-<hardware>.json``; an existing one is never overwritten."""
    date = results.date.removesuffix("+00:00").replace(":", "-")
    stem = f"{date}-{slug(case)}-{slug(results.hardware)}"
    for suffix in ("", *(f"-{idx}" for idx in range(2, 1000))):
        path = folder / f"{stem}{suffix}.json"
        with contextlib.suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
            file.write(results.as_json())
            return path
    raise ConfigError(f"{folder} is full of files named {stem}-*.json; choose another --output-dir")


def slug(text: str) -> str:
    """Lower case letters, digits, dots and plus signs; dashes for the rest."""
    return re.sub(r"[^a-z0-9.+]+", "-", text.lower()).strip("-")


def _checkout() -> tuple[str | None, bool | None]:
    """The commit of the checkout this package runs from; None for an installed copy, even inside another repository."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        _git("ls-files", "--error-unmatch", "__init__.py")
        return _git("rev-parse", "HEAD"), bool(_git("status", "--porcelain", "--untracked-files=no"))
    return None, None


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parents[1]), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
