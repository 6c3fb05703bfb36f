"""From collected tokens to what callers see. Runs in a thread of its own, so that text never delays a step."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from slipstream.engine.detokenizer import Decoder, IncrementalDetokenizer, StopStringMatcher
from slipstream.errors import RequestError
from slipstream.speculative_config import SpeculativeConfig
from slipstream.types import (
    Completion,
    DraftStats,
    FinishReason,
    Logprob,
    LogprobRow,
    Logprobs,
    Request,
    RequestOutput,
    RequestTimings,
    TokenUpdate,
    TokenUpdates,
)

Sink = Callable[[RequestOutput], None]


@dataclass(slots=True)
class _Caller:
    """One prompt and all its continuations, on their way to whoever asked."""

    request_id: str
    requests: Sequence[Request]
    prompt: str | None
    sink: Sink
    every_token: bool  # else only the end is delivered
    completions: list[Completion]
    timings: RequestTimings = field(default_factory=RequestTimings)
    num_cached_tokens: int = 0
    prompt_logprobs: list[Logprobs | None] | None = None
    error: str | None = None
    prompt_token_ids: list[int] = field(init=False)  # one list for all outputs

    def __post_init__(self) -> None:
        self.prompt_token_ids = list(self.requests[0].prompt_token_ids)

    @property
    def finished(self) -> bool:
        return all(completion.finish_reason is not None for completion in self.completions)

    def deliver(self) -> None:
        if not (self.every_token or self.finished):
            return
        first = self.requests[0]
        self.timings.total_s = time.monotonic() - first.arrival_time
        completions = []
        for c in self.completions:
            logprobs = None if c.logprobs is None else c.logprobs[:]
            drafts = None if c.speculation is None else c.speculation.copy()
            ends = (c.finish_reason, c.stop_reason)
            completions.append(Completion(c.index, c.text, c.token_ids[:], *ends, logprobs, drafts, c.delta_text))
            c.delta_text = ""
        self.sink(
            RequestOutput(
                request_id=self.request_id,
                prompt=self.prompt,
                prompt_token_ids=self.prompt_token_ids,
                outputs=completions,
                seed=first.params.seed or 0,
                timings=replace(self.timings),
                finished=self.finished,
                error=self.error,
                num_cached_tokens=self.num_cached_tokens,
                prompt_logprobs=self.prompt_logprobs,
            )
        )


@dataclass(slots=True)
class _Stream:
    """One continuation."""

    request: Request
    caller: _Caller
    completion: Completion
    detokenizer: IncrementalDetokenizer
    matcher: StopStringMatcher
    # Nobody looks at the text before the end, neither a reader nor a search for stop strings: it is made in one go.
    is_text_late: bool
    num_shown: int = 0  # tokens whose text has been made
    checked: list[tuple[int, int]] = field(default_factory=list)  # drafts and how many were accepted, not yet counted
    is_quiet: bool = field(init=False)  # tokens alone are nothing to act on
    token_ids: list[int] = field(init=False)  # the completion's own

    def __post_init__(self) -> None:
        self.is_quiet = self.is_text_late and self.completion.logprobs is None
        self.token_ids = self.completion.token_ids

    def count_drafts(self) -> None:
        if self.checked and (figures := self.completion.speculation) is not None:
            for drafts, times in Counter(self.checked).items():
                figures.add(*drafts, times)
            self.checked.clear()

    def show(self, text: str) -> None:
        self.completion.text += text
        self.completion.delta_text += text


class OutputProcessor:
    """``end_request`` tells the engine to stop computing a request that ended here. ``speculative``: if it drafts."""

    def __init__(
        self, decoder: Decoder, end_request: Callable[[str], None], speculative: SpeculativeConfig | None = None
    ) -> None:
        self._decoder = decoder
        self._end_request = end_request
        self._speculative = speculative
        self._streams: dict[str, _Stream] = {}
        self._callers: dict[str, _Caller] = {}
        self.taps: list[Callable[[TokenUpdates], None]] = []  # see tokens before they become anybody's output
        self._inbox: queue.SimpleQueue[TokenUpdates | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="slipstream-output", daemon=True)
        self._thread.start()

    def register(
        self, request_id: str, requests: Sequence[Request], prompt: str | None, sink: Sink, every_token: bool
    ) -> None:
        if request_id in self._callers:
            raise RequestError(f"request id '{request_id}' is already in use; choose another")
        caller = _Caller(request_id, requests, prompt, sink, every_token, [])
        self._callers[request_id] = caller
        for request in requests:
            params = request.params
            logprobs: list[Logprobs] | None = None if params.logprobs is None else []
            completion = Completion(request.choice, logprobs=logprobs, speculation=self._no_drafts())
            caller.completions.append(completion)
            self._streams[request.request_id] = _Stream(
                request,
                caller,
                completion,
                IncrementalDetokenizer(self._decoder, params.skip_special_tokens),
                StopStringMatcher(params.stop, params.include_stop_str_in_output),
                is_text_late=not every_token and not params.stop,
            )

    def _no_drafts(self) -> DraftStats | None:
        """Figures to begin with, where the engine drafts."""
        if self._speculative is None:
            return None
        return DraftStats(is_synthetic=self._speculative.is_synthetic)

    def deliver(self, updates: TokenUpdates) -> None:
        self._inbox.put(updates)

    def abort(self, request_id: str) -> None:
        caller = self._callers.get(request_id)
        for request in caller.requests if caller is not None else ():
            self.deliver(TokenUpdates.of([TokenUpdate(request.request_id, [], "abort", time=time.monotonic())]))
            self._end_request(request.request_id)

    def forget(self, request_id: str) -> None:
        """Nobody is to be told anything of this request: it could not be started."""
        caller = self._callers.pop(request_id, None)
        for request in caller.requests if caller is not None else ():
            self._streams.pop(request.request_id, None)
            self._end_request(request.request_id)

    def close(self) -> None:
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (updates := self._inbox.get()) is not None:
            self.process(updates)

    def process(self, updates: TokenUpdates) -> None:
        """Take the tokens of a step in, and hand on what callers are to see."""
        for tap in self.taps:
            tap(updates)
        streams, others, drafts = self._streams, updates.others, updates.num_drafts
        for place, request_id in enumerate(updates.request_ids):
            stream = streams.get(request_id)
            if stream is None:
                continue  # ended by a stop string or an abort while these tokens were in flight
            if stream.is_quiet and place not in others:
                stream.token_ids += updates.token_ids[place]
                if drafts and drafts[place]:
                    stream.checked.append((drafts[place], updates.num_accepted[place]))
            else:
                self._take(stream, updates.at(place))

    def _take(self, stream: _Stream, update: TokenUpdate) -> None:
        try:
            self._process(stream, update)
            if stream.caller.every_token or stream.completion.finish_reason is not None:
                stream.caller.deliver()
        except Exception as error:  # the fault of one request must not silence the others
            self._fail(stream, f"delivering the output failed: {type(error).__name__}: {error}")

    def _fail(self, stream: _Stream, reason: str) -> None:
        self._end_request(stream.request.request_id)
        self._finish(stream, "error", None, reason)
        with contextlib.suppress(Exception):  # the sink itself may be what is broken
            stream.caller.deliver()

    def _process(self, stream: _Stream, update: TokenUpdate) -> None:
        caller = stream.caller
        caller.num_cached_tokens = max(caller.num_cached_tokens, update.num_cached_tokens)
        if caller.timings.first_token_s is None and update.token_ids:
            caller.timings.first_token_s = update.time - stream.request.arrival_time
        if update.prompt_logprobs is not None:
            self._take_prompt_logprobs(stream, *update.prompt_logprobs)
        if update.logprobs is not None and stream.completion.logprobs is not None:
            wanted = stream.request.params.logprobs or 0
            stream.completion.logprobs += [self._logprobs(row, wanted) for row in update.logprobs]
        known = stream.completion.token_ids
        num_known = len(known)
        known += update.token_ids
        self._show_text(stream, update)
        if update.num_drafts:
            # A draft behind a stop string is not accepted, as one behind a stop token is not.
            stream.checked.append((update.num_drafts, min(update.num_accepted, len(known) - num_known)))
        stream.count_drafts()

    def _show_text(self, stream: _Stream, update: TokenUpdate) -> None:
        """Make the text of the new tokens, and end the stream where it ends."""
        known = stream.completion.token_ids
        if stream.is_text_late and update.finish_reason is None:
            return
        # A stop token is part of the tokens but not of the text.
        num_texts = len(known) - (update.finish_reason == "stop" and bool(update.token_ids))
        if stream.is_text_late:
            stream.show(stream.detokenizer.add(known[stream.num_shown : num_texts]))
            stream.num_shown = num_texts
        while stream.num_shown < num_texts:
            stream.num_shown += 1
            stream.show(stream.matcher.add(stream.detokenizer.add(known[stream.num_shown - 1 : stream.num_shown])))
            if stream.matcher.matched is not None:
                # What came behind the stop string in the same update is not the request's any more.
                del known[stream.num_shown :]
                if stream.completion.logprobs is not None:
                    del stream.completion.logprobs[stream.num_shown :]
                self._end_request(update.request_id)
                self._finish(stream, "stop", stream.matcher.matched, None)
                return
        if update.finish_reason is None:
            return
        stream.show(stream.matcher.add(stream.detokenizer.flush()))
        if stream.matcher.matched is not None:
            self._finish(stream, "stop", stream.matcher.matched, None)
            return
        stream.show(stream.matcher.flush())
        self._finish(stream, update.finish_reason, update.stop_reason, update.error)

    def _take_prompt_logprobs(self, stream: _Stream, first_position: int, rows: list[LogprobRow]) -> None:
        """Positions may come again after a preemption, and every continuation brings them; the first is kept."""
        caller, wanted = stream.caller, stream.request.params.prompt_logprobs or 0
        if caller.prompt_logprobs is None:
            caller.prompt_logprobs = [None]
        known = caller.prompt_logprobs
        for position, row in enumerate(rows, first_position):
            if position == len(known):
                known.append(self._logprobs(row, wanted))

    def _logprobs(self, row: LogprobRow, num_top: int) -> Logprobs:
        token, *likeliest = row.token_ids
        found = {
            token_id: Logprob(value, rank, self._text_of(token_id))
            for rank, (token_id, value) in enumerate(zip(likeliest[:num_top], row.values[1:], strict=False), 1)
            if token_id >= 0
        }
        return {token: Logprob(row.values[0], row.rank, self._text_of(token)), **found}

    def _text_of(self, token_id: int) -> str:
        return self._decoder.decode([token_id], skip_special_tokens=False)

    def _finish(self, stream: _Stream, finish: FinishReason, stop_reason: int | str | None, error: str | None) -> None:
        completion, caller = stream.completion, stream.caller
        completion.finish_reason, completion.stop_reason = finish, stop_reason
        caller.error = caller.error or error
        self._streams.pop(stream.request.request_id, None)
        if caller.finished:
            self._callers.pop(caller.request_id, None)
