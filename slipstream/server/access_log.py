"""One line and one count for every request, whatever became of it."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.server.generation import Generation
from slipstream.server.metrics import ServerMetrics
from slipstream.types import SYNTHETIC_NOTICE

CLIENT_GONE = 499  # as nginx reports a client that hung up
FIGURES = "slipstream.figures"  # where a route leaves them in the request's scope


@dataclass
class Figures:
    """What a route knows of its request beyond the status."""

    request_id: str
    generation: Generation
    status: int | None = None  # of an error that came after the headers were sent

    @property
    def is_complete(self) -> bool:
        outputs = self.generation.latest
        return len(outputs) == len(self.generation.submissions) and all(o.finished for o in outputs.values())


class AccessLog:
    """The outermost layer: it sees refusals too."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, written: bool) -> None:
        self._app = app
        self._metrics = metrics
        self._written = written

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.monotonic(), CLIENT_GONE

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            self._note(scope, status, time.monotonic() - start)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        figures: Figures | None = scope.get(FIGURES)
        if figures is not None and status == 200:
            status = figures.status or (200 if figures.is_complete else CLIENT_GONE)
        # By route, not by what was asked for: strangers must not make new series.
        route = getattr(scope.get("route"), "path", "other")
        self._metrics.requests.labels(route, str(status)).inc()
        if not self._written:
            return
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "total_ms": round(1000 * seconds, 1),
        }
        if figures is not None:
            generation = figures.generation
            outputs = generation.latest.values()
            firsts = [o.timings.first_token_s for o in outputs if o.timings.first_token_s is not None]
            line |= {
                "id": figures.request_id,
                "prompt_tokens": generation.num_prompt_tokens,
                "cached_tokens": generation.num_cached_tokens,
                "output_tokens": generation.num_output_tokens,
                "first_token_ms": round(1000 * min(firsts), 1) if firsts else None,
                "finish": [choice.finish_reason for output in outputs for choice in output.outputs],
            }
            if drafts := generation.drafts:
                counts = {"drafts": sum(d.num_drafts for d in drafts), "accepted": sum(d.num_accepted for d in drafts)}
                line |= counts | ({"synthetic": SYNTHETIC_NOTICE} if drafts[0].is_synthetic else {})
        sys.stderr.write(json.dumps(line) + "\n")
