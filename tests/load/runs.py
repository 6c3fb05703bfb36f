"""Runs put together by hand, one request at a time."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.load.records import Recorder, Records
from slipstream.load.response import Response

CPU = {"cpu_s": 0.5, "wall_s": 1.0, "num_events": 100.0}


class Run:
    """Requests in seconds; ``records`` puts them in columns."""

    def __init__(self) -> None:
        self.recorder = Recorder()

    def ok(
        self, start: float, event_times: Sequence[float], end: float, *, tokens: int = -1, prompt_tokens: int = -1
    ) -> None:
        response = Response()
        response.events.times.extend(event_times)
        response.events.output_tokens, response.events.prompt_tokens = tokens, prompt_tokens
        self.recorder.add(start, start, end, response)

    def failed(self, start: float, end: float, reason: str) -> None:
        response = Response()
        response.events.times.append(start)  # what came before the failure does not count
        response.failure = reason
        self.recorder.add(start, start, end, response)

    def unfinished(self, start: float, end: float) -> None:
        self.recorder.add_unfinished(start, start, end)

    def records(self, origin: float = 0.0, cpu: dict[str, float] | None = None) -> Records:
        return self.recorder.records(origin, cpu or dict(CPU))
