"""llama.cpp's measuring tools, built once for this machine from a source package whose version and hash are pinned.

They live in the cache folder, apart for each kind of processor. Where they cannot be had, `UnavailableError` says why
in one line.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

from slipstream.checkpoints.verified_file import exclusive
from slipstream.commands.machine import cpu_name, instruction_sets, num_cores
from slipstream.config import cache_dir

PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
COMMIT = "0c1e57098"  # of llama.cpp, which that package carries in whole
NAME = f"llama.cpp {COMMIT} ({PACKAGE} {VERSION})"
TOOLS = ("llama-bench", "llama-batched-bench", "llama-speculative-simple", "llama-completion")
_INSIDE = "/vendor/llama.cpp/"
_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",  # the tools then run from wherever they lie
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_CURL=OFF",
    f"-DLLAMA_BUILD_COMMIT={COMMIT}",
)


class UnavailableError(Exception):
    """Why llama.cpp cannot be had on this machine."""


def find_or_build() -> Path:
    """The folder with the tools; builds them if need be, with a line of progress."""
    folder = cache_dir() / "benchmarks" / f"{PACKAGE}-{VERSION}"
    # What is built for one processor may not run on another that shares the home folder.
    key = hashlib.sha256(" ".join([cpu_name(), *instruction_sets()]).encode()).hexdigest()[:8]
    tools = folder / f"tools-{key}"
    if is_complete(tools):
        return tools
    for program in ("cmake", "cc", "c++"):
        if shutil.which(program) is None:
            raise UnavailableError(f"building it needs {program}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with exclusive(folder / "build.lock", on_wait=lambda: _say("another process builds llama.cpp; waiting")):
            if not is_complete(tools):
                with tempfile.TemporaryDirectory(dir=folder) as scratch:
                    _build(Path(scratch), tools)
    except OSError as error:
        raise UnavailableError(f"{folder} cannot be written ({error.strerror or error})") from error
    return tools


def is_complete(tools: Path) -> bool:
    return all((tools / name).is_file() for name in TOOLS)


def _build(scratch: Path, tools: Path) -> None:
    _say(f"fetching {PACKAGE} {VERSION}")
    source = unpack(_fetch(scratch), scratch)
    build = scratch / "build"
    _run(["cmake", "-S", source, "-B", build, *_OPTIONS], "configuring it failed")
    command = ["cmake", "--build", build, "--parallel", num_cores(), "--target", *TOOLS]
    with subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        last = _show_progress(process.stdout)
    if process.returncode:
        raise UnavailableError(f"building it failed: {last}")
    tools.mkdir(exist_ok=True)
    for name in TOOLS:
        shutil.move(build / "bin" / name, tools / name)


def _fetch(folder: Path) -> Path:
    """The source package, checked. pip asks its build backend for its name and version; nothing of it is installed."""
    options = ["--no-deps", "--no-binary", PACKAGE, "--dest", folder, f"{PACKAGE}=={VERSION}"]
    _run([sys.executable, "-m", "pip", "download", "--quiet", *options], "its source package cannot be fetched")
    archives = list(folder.glob("*.tar.gz"))
    if len(archives) != 1 or hashlib.sha256(archives[0].read_bytes()).hexdigest() != SHA256:
        raise UnavailableError(f"the source package {PACKAGE} {VERSION} is not the one whose hash is pinned here")
    return archives[0]


def unpack(archive: Path, folder: Path) -> Path:
    """llama.cpp's own files out of the package. They are no checkout: what their build would ask git is pinned."""
    target = folder / "source"
    with tarfile.open(archive) as tar:
        for member in tar:
            _, found, name = member.name.partition(_INSIDE)
            if found and member.isfile() and name.split("/")[0] != ".git":
                member.name = name
                tar.extract(member, target, filter="data")
    return target


def _run(command: Iterable[object], what: str) -> None:
    try:
        subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    except subprocess.CalledProcessError as error:
        lines = [line for line in (error.stderr or error.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()] or lines[-1:] or [str(error)]
        raise UnavailableError(f"{what}: {errors[0].strip()}") from error


def _show_progress(lines: Iterable[str]) -> str:
    """Follow cmake's percentages: one line that is overwritten, or one for each tenth without a terminal."""
    shown, last, live = -1, "", sys.stderr.isatty()
    for line in lines:
        last = line.strip() or last
        if found := re.match(r"\[ *(\d+)%\]", line):
            percent = int(found[1])
            if percent >= shown + (1 if live else 10):
                shown = percent
                print(f"building {NAME}: {percent} %", end="\r" if live else "\n", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):
        print(file=sys.stderr, end="\n" if live else "")
    return last


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
