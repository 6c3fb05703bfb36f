"""A timeline of host and device as a file for Perfetto and chrome://tracing. SLIPSTREAM_TRACE turns it on."""

from __future__ import annotations

import atexit
import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from slipstream.config import trace_path
from slipstream.device.interface import Device, Timestamp
from slipstream.errors import ConfigError
from slipstream.plan import StepPlan

_MAX_STEPS = 100_000  # larger traces cannot be opened
_NOTHING: AbstractContextManager[None] = nullcontext()


class NoTrace:
    def host(self, name: str) -> AbstractContextManager[None]:
        return _NOTHING

    def device(self, plan: StepPlan) -> AbstractContextManager[None]:
        return _NOTHING


class Trace:
    """Ranges are kept in memory and written at exit; the device's times are read only then."""

    def __init__(self, path: Path, device: Device) -> None:
        try:
            path.write_text("", encoding="utf-8")  # fails now, not at the end, if it cannot be written
        except OSError as error:
            raise ConfigError(f"SLIPSTREAM_TRACE names {path}, which cannot be written: {error.strerror}") from error
        self._path = path
        self._device = device
        self._host: list[tuple[str, float, float]] = []
        self._steps: list[tuple[str, dict[str, int], Timestamp, Timestamp]] = []
        self._stamp()  # aligns the clocks, which synchronises
        atexit.register(self.write)

    @contextmanager
    def host(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        if len(self._host) < 8 * _MAX_STEPS:
            self._host.append((name, start, time.monotonic()))

    @contextmanager
    def device(self, plan: StepPlan) -> Iterator[None]:
        """The step's work on the compute stream, from its first launch to its last."""
        begin = self._stamp()
        yield
        end = self._stamp()
        if begin is not None and end is not None and len(self._steps) < _MAX_STEPS:
            num_reqs = plan.composition.num_reqs
            kind = "decode" if plan.num_tokens == num_reqs else "mixed"
            sizes = {"step": plan.step_id, "requests": num_reqs, "tokens": plan.num_tokens}
            self._steps.append((f"{kind} {num_reqs}x{plan.num_tokens}", sizes, begin, end))

    def _stamp(self) -> Timestamp | None:
        with self._device.use_stream(self._device.compute_stream):
            return self._device.timestamp()

    def write(self) -> None:
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": name}}
            for tid, name in ((0, "host"), (1, f"{self._device.name}: compute stream"))
        ]
        events += [_range(name, 0, start, end, {}) for name, start, end in self._host]
        events += [_range(name, 1, begin(), end(), sizes) for name, sizes, begin, end in self._steps]
        self._path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _range(name: str, tid: int, start: float, end: float, details: dict[str, int]) -> dict[str, Any]:
    times = {"ts": round(1e6 * start, 3), "dur": round(1e6 * (end - start), 3)}
    return {"ph": "X", "name": name, "pid": 0, "tid": tid, **times, "args": details}


def open_trace(device: Device) -> Trace | NoTrace:
    path = trace_path()
    return NoTrace() if path is None else Trace(path, device)
