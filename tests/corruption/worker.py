"""Runs damaged models through the command line, one after another in one process, and reports what came of each.

``python -m tests.corruption.worker MODELS``: a line ``SEED NUMBER`` in, a line of JSON out. All that the process writes
while a case runs is caught at the file descriptors, so that what native code prints is seen as well.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

import torch

from slipstream.cli import main
from tests.corruption.cases import make_case

# An allocation beyond this fails at once, whatever the machine has.
_MAX_ADDRESS_BYTES = 24 << 30


def run_all(models: Path, requests: IO[str], answers: IO[str]) -> None:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_ADDRESS_BYTES, _MAX_ADDRESS_BYTES))
    for line in requests:
        seed, number = map(int, line.split())
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            case = make_case(models, Path(folder), seed, number)
            # So that a case that never ends can be named.
            answers.write(json.dumps({"note": case.note}) + "\n")
            answers.flush()
            before = _reset_peak()
            start = time.perf_counter()
            code = _run_into(out, err, case.arguments)
            answer = {
                "code": code,
                "seconds": time.perf_counter() - start,
                "grown_bytes": _memory("VmHWM") - before,
                "out": _content(out),
                "err": _content(err),
            }
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _run_into(out: IO[bytes], err: IO[bytes], arguments: list[str]) -> int:
    saved = [os.dup(1), os.dup(2)]
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    try:
        return main(arguments)
    except BaseException as error:  # a panic of native code is no Exception
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return -1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, kept in enumerate(saved, start=1):
            os.dup2(kept, fd)
            os.close(kept)


def _reset_peak() -> int:
    """Memory in use, from which the peak counts anew."""
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _content(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


if __name__ == "__main__":
    # Standard output belongs to the cases.
    with os.fdopen(os.dup(1), "w") as stream:
        run_all(Path(sys.argv[1]), sys.stdin, stream)
