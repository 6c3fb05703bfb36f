"""The results of all requests in columns: a few arrays instead of an object for each token."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.load.response import Response

BOOLS = NDArray[np.bool_]
FLOATS = NDArray[np.float64]
INTS = NDArray[np.int64]
OK, UNFINISHED = -1, -2


@dataclass(slots=True)
class Records:
    """Of all requests that were sent; times in seconds since the start of the measurement."""

    start: FLOATS  # when sending began
    due: FLOATS  # when it should begin; equal to start in a closed loop
    end: FLOATS  # when the response was complete or had failed
    outcome: INTS  # OK, UNFINISHED (the run was stopped), or an index into failures
    num_events: INTS  # of text; 0 unless OK
    prompt_tokens: INTS  # as the server counted; -1 if it did not
    output_tokens: INTS
    event_times: FLOATS  # of all requests, one after another
    failures: list[str]  # the first message of each kind of failure
    cpu: list[dict[str, float]]  # of each client process: cpu_s, wall_s, num_events

    @property
    def is_ok(self) -> BOOLS:
        found: BOOLS = self.outcome == OK
        return found

    @classmethod
    def joined(cls, parts: Sequence[Records]) -> Records:
        """The records of several processes; equal failures are merged."""
        failures: list[str] = []
        outcomes = []
        for part in parts:
            kinds = {kind_of(reason): idx for idx, reason in enumerate(failures)}
            outcome = part.outcome.copy()
            for idx, reason in enumerate(part.failures):
                if kind_of(reason) not in kinds:
                    kinds[kind_of(reason)] = len(failures)
                    failures.append(reason)
                outcome[part.outcome == idx] = kinds[kind_of(reason)]
            outcomes.append(outcome)
        names = ("start", "due", "end", "num_events", "prompt_tokens", "output_tokens", "event_times")
        columns: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        cpu = [process for part in parts for process in part.cpu]
        return cls(outcome=np.concatenate(outcomes), failures=failures, cpu=cpu, **columns)


class Recorder:
    """Collects the columns while requests end."""

    def __init__(self) -> None:
        self.num_ok = self.num_failed = self.num_events = 0
        self.failures: list[str] = []
        self._kinds: dict[str, int] = {}
        self._floats = {name: array("d") for name in ("start", "due", "end", "event_times")}
        self._ints = {name: array("q") for name in ("outcome", "num_events", "prompt_tokens", "output_tokens")}

    def add(self, start: float, due: float, end: float, response: Response) -> None:
        """A request that succeeded or failed."""
        events = response.events
        if response.failure is not None:
            outcome = self._failure_idx(response.failure)
            self.num_failed += 1
            self._append(start, due, end, outcome)
            return
        self._append(start, due, end, OK, len(events.times), events.prompt_tokens, events.output_tokens)
        self._floats["event_times"].extend(events.times)
        self.num_events += len(events.times)
        self.num_ok += 1

    def add_unfinished(self, start: float, due: float, now: float) -> None:
        """A request that was under way when the run was stopped."""
        self._append(start, due, now, UNFINISHED)

    def records(self, origin: float, cpu: dict[str, float]) -> Records:
        floats: dict[str, Any] = {name: np.array(column, np.float64) - origin for name, column in self._floats.items()}
        ints: dict[str, Any] = {name: np.array(column, np.int64) for name, column in self._ints.items()}
        return Records(failures=self.failures, cpu=[cpu], **floats, **ints)

    def _append(
        self,
        start: float,
        due: float,
        end: float,
        outcome: int,
        num_events: int = 0,
        prompt_tokens: int = -1,
        output_tokens: int = -1,
    ) -> None:
        for name, time in (("start", start), ("due", due), ("end", end)):
            self._floats[name].append(time)
        counts = {"num_events": num_events, "prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
        for name, count in ({"outcome": outcome} | counts).items():
            self._ints[name].append(count)

    def _failure_idx(self, reason: str) -> int:
        kind = kind_of(reason)
        if kind not in self._kinds:
            self._kinds[kind] = len(self.failures)
            self.failures.append(reason)
        return self._kinds[kind]


def kind_of(reason: str) -> str:
    """Failures of a kind are counted together; the text after the colon may differ each time, such as an id."""
    return reason.partition(":")[0]
