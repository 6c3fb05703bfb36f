"""Starts the worker, asks for cases, and judges what came of them. A worker that dies or hangs is replaced."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

MAX_SECONDS = 10.0
MAX_GROWN_BYTES = 1 << 30
_START_SECONDS = 120.0  # of an interpreter with torch, on a busy machine
_HANG_SECONDS = 60.0  # after which a case is given up
# The one error that may come after some text: weights that only fail for a token that was generated.
_LATE_ERROR = "the model produced logits that are not numbers"

# Errors that may be one line, but mean that something was found too late.
_OURS = ("out of memory", "bug of ours", "the engine stopped", "GiB for weights")


class Outcome(NamedTuple):
    code: int | None  # None: the process died or hung
    seconds: float
    grown_bytes: int
    out: str
    err: str


def find_fault(outcome: Outcome) -> str | None:
    """What is wrong with how a damaged model was met; None if nothing is."""
    code, seconds, grown_bytes, out, err = outcome
    if code is None:
        return f"the process did not answer: {err}"
    if code not in (0, 2):
        return f"exit code {code}: {_tail(err)}"
    if code == 2 and not (err.startswith("error: ") and err.endswith("\n") and err.count("\n") == 1):
        return f"not one line: {_tail(err)}"
    if code == 2 and out and _LATE_ERROR not in err:
        return f"output beside the error: {out[:100]!r}, {_tail(err)}"
    if code == 0 and not out:
        return "exit code 0, but no answer"
    if any(text in err for text in _OURS):
        return _tail(err)
    if seconds > MAX_SECONDS:
        return f"{seconds:.1f} seconds: {_tail(err)}"
    if grown_bytes > MAX_GROWN_BYTES:
        return f"{grown_bytes >> 20} MiB: {_tail(err)}"
    return None


def _tail(err: str) -> str:
    return repr(err[-500:])


class Worker:
    def __init__(self, models: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.corruption.worker", str(models)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._unread = b""

    def run(self, seed: int, number: int, limit: float) -> tuple[str, Outcome]:
        """What was done to which file, and what came of it."""
        note = "before the damage was done"
        start = time.perf_counter()
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(f"{seed} {number}\n".encode())
            self._process.stdin.flush()
            note = self._read(limit)["note"]
            return note, Outcome(**self._read(limit))
        except (TimeoutError, BrokenPipeError) as error:
            return note, Outcome(None, time.perf_counter() - start, 0, "", self.end() or type(error).__name__)

    def _read(self, limit: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        end = time.monotonic() + limit
        while b"\n" not in self._unread:
            if not select.select([self._process.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                raise BrokenPipeError
            self._unread += piece
        line, self._unread = self._unread.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def end(self) -> str:
        """Stop it, and return how it ended by itself, if it did, with its last output."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(2.0)
        ended = self._process.poll()
        self._process.kill()
        _, err = self._process.communicate()
        return "" if ended is None else f"exit code {ended}: {err.decode(errors='replace')[-500:]}"


@contextmanager
def _worker(models: Path) -> Iterator[Worker]:
    worker = Worker(models)
    try:
        yield worker
    finally:
        worker.kill()


def run_cases(models: Path, seed: int, numbers: range) -> Iterator[tuple[int, str, Outcome]]:
    """Each case with its number, what was done, and what came of it."""
    remaining = list(numbers)
    while remaining:
        with _worker(models) as worker:
            limit = _START_SECONDS
            while remaining:
                number = remaining.pop(0)
                note, outcome = worker.run(seed, number, limit)
                yield number, note, outcome
                if outcome.code is None:
                    break
                limit = _HANG_SECONDS
