"""One log line and one count for every request. Lines are limited per second, so that a flood cannot fill the disk."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import Any

from slipstream.output import SYNTHETIC_NOTICE
from slipstream.server.generation import Generation
from slipstream.server.http.exchange import Exchange
from slipstream.server.metrics import ServerMetrics

CLIENT_GONE = 499  # as nginx reports a client that hung up
_LONGEST_PATH = 200
_LINES_PER_S, _LINES_AT_ONCE = 500.0, 5000.0


@dataclass
class RequestNote:
    """What a route knows of its request beyond the status."""

    request_id: str
    generation: Generation
    status: int | None = None  # of an error that came after the headers were sent


class LineLimit:
    """At most so many lines a second in the long run. Dropped lines are counted; the next line reports them."""

    def __init__(self, rate: float = _LINES_PER_S, most_at_once: float = _LINES_AT_ONCE) -> None:
        self._rate, self._most = rate, most_at_once
        self._credit, self._time = most_at_once, time.monotonic()
        self.num_left_out = 0

    def take(self, now: float) -> bool:
        self._credit = min(self._most, self._credit + (now - self._time) * self._rate)
        self._time = now
        if self._credit < 1:
            self.num_left_out += 1
            return False
        self._credit -= 1
        return True


class AccessLog:
    def __init__(self, metrics: ServerMetrics, is_written: bool, limit: LineLimit | None = None) -> None:
        self._metrics = metrics
        self._is_written = is_written
        self._limit = limit or LineLimit()

    def note(self, exchange: Exchange) -> None:
        """Called when the exchange ends: it was answered, or its client disconnected."""
        status = exchange.status or CLIENT_GONE
        note: RequestNote | None = exchange.note
        if note is not None and status == 200:
            status = note.status or (200 if note.generation.is_complete else CLIENT_GONE)
        # Counted by route, not by path: a client must not be able to create new time series.
        self._metrics.count_request(route_of(exchange.request.path), status)
        if self._is_written and self._limit.take(time.monotonic()):
            sys.stderr.write(json.dumps(self._line(exchange, note, status)) + "\n")

    def _line(self, exchange: Exchange, note: RequestNote | None, status: int) -> dict[str, Any]:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "request_id": exchange.request_id,
            "method": exchange.request.method,
            "path": exchange.request.path[:_LONGEST_PATH],
            "status": status,
            "total_ms": round(1000 * exchange.seconds(), 1),
        }
        if self._limit.num_left_out:
            line["lines_left_out"], self._limit.num_left_out = self._limit.num_left_out, 0
        if note is None:
            return line
        generation = note.generation
        first_s = generation.first_token_s
        line |= {
            "id": note.request_id,
            "prompt_tokens": generation.num_prompt_tokens,
            "cached_tokens": generation.num_cached_tokens,
            "output_tokens": generation.num_output_tokens,
            "first_token_ms": None if first_s is None else round(1000 * first_s, 1),
            "finish": [choice.finish_reason for choice in generation.completions],
        }
        if drafts := generation.drafts:
            counts = {"drafts": sum(d.num_drafts for d in drafts), "accepted": sum(d.num_accepted for d in drafts)}
            line |= counts | ({"synthetic": SYNTHETIC_NOTICE} if drafts[0].is_synthetic else {})
        return line


def route_of(path: str) -> str:
    """The route of a path, as metrics name it."""
    return "/v1/models/{name:path}" if path.startswith("/v1/models/") else path
