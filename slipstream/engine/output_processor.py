"""From collected tokens to what callers see. Runs in a thread of its own, so that text never delays a step."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from slipstream.engine.detokenizer import Decoder, IncrementalDetokenizer, StopStringMatcher
from slipstream.errors import RequestError
from slipstream.types import Completion, FinishReason, Request, RequestOutput, RequestTimings, TokenUpdate

Sink = Callable[[RequestOutput], None]


@dataclass(slots=True)
class _Stream:
    """One request on its way to its caller."""

    request: Request
    prompt: str | None
    sink: Sink
    every_token: bool  # else only the end is delivered
    detokenizer: IncrementalDetokenizer
    matcher: StopStringMatcher
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    timings: RequestTimings = field(default_factory=RequestTimings)

    def output(
        self, delta: str, finish: FinishReason | None, stop_reason: int | str | None, error: str | None
    ) -> RequestOutput:
        self.timings.total_s = time.monotonic() - self.request.arrival_time
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(self.request.prompt_token_ids),
            outputs=[Completion(0, self.text, list(self.token_ids), finish, stop_reason)],
            seed=self.request.params.seed or 0,
            timings=RequestTimings(self.timings.first_token_s, self.timings.total_s),
            finished=finish is not None,
            error=error,
            delta_text=delta,
        )


class OutputProcessor:
    """``end_request`` tells the engine to stop computing a request that ended here."""

    def __init__(self, decoder: Decoder, end_request: Callable[[str], None]) -> None:
        self._decoder = decoder
        self._end_request = end_request
        self._streams: dict[str, _Stream] = {}
        self._inbox: queue.SimpleQueue[list[TokenUpdate] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="slipstream-output", daemon=True)
        self._thread.start()

    def register(self, request: Request, prompt: str | None, sink: Sink, every_token: bool) -> None:
        if request.request_id in self._streams:
            raise RequestError(f"request id '{request.request_id}' is already in use; choose another")
        self._streams[request.request_id] = _Stream(
            request,
            prompt,
            sink,
            every_token,
            IncrementalDetokenizer(self._decoder),
            StopStringMatcher(request.params.stop),
        )

    def deliver(self, updates: list[TokenUpdate]) -> None:
        self._inbox.put(updates)

    def abort(self, request_id: str) -> None:
        self.deliver([TokenUpdate(request_id, [], "abort", time=time.monotonic())])
        self._end_request(request_id)

    def close(self) -> None:
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (updates := self._inbox.get()) is not None:
            for update in updates:
                stream = self._streams.get(update.request_id)
                if stream is None:
                    continue  # ended by a stop string or an abort while these tokens were in flight
                try:
                    self._process(stream, update)
                except Exception as error:  # the fault of one request must not silence the others
                    self._fail(stream, f"delivering the output failed: {type(error).__name__}: {error}")

    def _fail(self, stream: _Stream, reason: str) -> None:
        self._end_request(stream.request.request_id)
        self._streams.pop(stream.request.request_id, None)
        with contextlib.suppress(Exception):  # the sink itself may be what is broken
            stream.sink(stream.output("", "error", None, reason))

    def _process(self, stream: _Stream, update: TokenUpdate) -> None:
        if stream.timings.first_token_s is None and update.token_ids:
            stream.timings.first_token_s = update.time - stream.request.arrival_time
        delta = ""
        for i, token_id in enumerate(update.token_ids):
            stream.token_ids.append(token_id)
            # A stop token is part of the tokens but not of the text.
            last = i == len(update.token_ids) - 1
            if last and update.finish_reason == "stop":
                break
            delta += stream.matcher.add(stream.detokenizer.add([token_id]))
            if stream.matcher.matched is not None:
                self._end_request(update.request_id)
                self._finish(stream, delta, "stop", stream.matcher.matched, None)
                return
        if update.finish_reason is None:
            stream.text += delta
            if stream.every_token:
                stream.sink(stream.output(delta, None, None, None))
            return
        delta += stream.matcher.add(stream.detokenizer.flush())
        if stream.matcher.matched is not None:
            self._finish(stream, delta, "stop", stream.matcher.matched, None)
            return
        delta += stream.matcher.flush()
        self._finish(stream, delta, update.finish_reason, update.stop_reason, update.error)

    def _finish(
        self, stream: _Stream, delta: str, finish: FinishReason, stop_reason: int | str | None, error: str | None
    ) -> None:
        stream.text += delta
        del self._streams[stream.request.request_id]
        stream.sink(stream.output(delta, finish, stop_reason, error))
