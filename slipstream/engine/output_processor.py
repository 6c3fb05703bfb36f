"""From collected tokens to text streams: detokenised, searched for stop strings, and ended.

The reader of a stream (``reader.py`` for callers of the library, the server's own) is notified of new output.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Protocol

from slipstream.engine.admission import Submission
from slipstream.engine.text_stream import TextStream
from slipstream.errors import RequestError
from slipstream.output import (
    Completion,
    DraftStats,
    FinishReason,
    Logprob,
    LogprobRow,
    Logprobs,
    TokenUpdate,
    TokenUpdates,
)
from slipstream.speculative_config import SpeculativeConfig
from slipstream.text.detokenizer import Decoder, StopStringMatcher, open_detokenizer


class Reader(Protocol):
    """The consumer of a prompt's streams. ``take`` is called where the updates are processed."""

    every_token: bool  # else notified only at the end of a stream

    def take(self, stream: TextStream) -> None:
        """There is new output of this stream: tokens, text or its end."""
        ...


class OutputProcessor:
    """``end_request`` tells the engine to stop computing a request that ended here. ``speculative``: if it drafts.

    ``process`` belongs to one thread; streams are registered and aborted from any.
    """

    def __init__(
        self, decoder: Decoder, end_request: Callable[[str], None], speculative: SpeculativeConfig | None = None
    ) -> None:
        self._decoder = decoder
        self._end_request = end_request
        self._speculative = speculative
        self.streams: dict[str, TextStream] = {}  # by the engine's own ids
        self.submissions: dict[str, Submission] = {}  # by the callers' ids
        self._lock = threading.Lock()  # guards the callers' ids, which any thread may register and release
        self.taps: list[Callable[[TokenUpdates], None]] = []  # see updates before they are processed

    def register(self, submission: Submission, reader: Reader) -> list[TextStream]:
        """The streams of a submission, in the order of its requests; the first update may come at once."""
        with self._lock:
            if submission.request_id in self.submissions:
                raise RequestError(f"request id '{submission.request_id}' is already in use; choose another")
            self.submissions[submission.request_id] = submission
        streams = []
        for request in submission.requests:
            params = request.params
            logprobs: list[Logprobs] | None = None if params.logprobs is None else []
            completion = Completion(request.choice, logprobs=logprobs, speculation=self._no_drafts())
            stream = TextStream(
                request=request,
                submission=submission,
                reader=reader,
                completion=completion,
                detokenizer=open_detokenizer(self._decoder, params.skip_special_tokens),
                matcher=StopStringMatcher(params.stop, params.include_stop_str_in_output) if params.stop else None,
            )
            streams.append(stream)
        self.streams.update((stream.request.request_id, stream) for stream in streams)
        return streams

    def _no_drafts(self) -> DraftStats | None:
        """Zero counts for a new stream, where the engine drafts."""
        if self._speculative is None:
            return None
        return DraftStats(is_synthetic=self._speculative.is_synthetic)

    def abort(self, request_id: str) -> TokenUpdates | None:
        """Abort a caller's request and free its id. Returns the ends of its streams to process; None if unknown."""
        with self._lock:
            submission = self.submissions.pop(request_id, None)
        if submission is None:
            return None
        for request in submission.requests:
            self._end_request(request.request_id)
        return TokenUpdates.from_list([TokenUpdate(request.request_id, [], "abort") for request in submission.requests])

    def forget(self, submission: Submission) -> None:
        """Remove every trace of a request without notifying its reader."""
        with self._lock:
            if self.submissions.get(submission.request_id) is submission:
                del self.submissions[submission.request_id]
        for request in submission.requests:
            if self.streams.pop(request.request_id, None) is not None:
                self._end_request(request.request_id)

    def process(self, updates: TokenUpdates) -> None:
        """Append the tokens of a step to their streams and notify the readers."""
        for tap in self.taps:
            tap(updates)
        streams, others, drafts = self.streams, updates.others, updates.num_drafts
        for i, request_id in enumerate(updates.request_ids):
            stream = streams.get(request_id)
            if stream is None:
                continue  # ended by a stop string or an abort while these tokens were in flight
            if i in others or not stream.is_plain:
                self._take(stream, updates.at(i))
                continue
            # The common case, which must be cheap: tokens of a stream that continues, with no logprobs or end.
            token_ids = updates.token_ids[i]
            stream.token_ids += token_ids
            if drafts and drafts[i]:
                stream.checked.append((drafts[i], updates.num_accepted[i]))
            if stream.first_token_time is None and token_ids:
                stream.first_token_time = updates.time
            if stream.is_text_late:
                continue
            try:
                stream.num_shown += len(token_ids)
                if text := stream.detokenizer.add(token_ids):
                    stream.completion.text += text
                    stream.completion.delta_text += text
                stream.reader.take(stream)
            except Exception as error:  # an error of one request must not affect the others
                self._fail(stream, error)

    def _take(self, stream: TextStream, update: TokenUpdate) -> None:
        try:
            self._process(stream, update)
            if stream.reader.every_token or stream.completion.finish_reason is not None:
                stream.reader.take(stream)
        except Exception as error:  # as above
            self._fail(stream, error)

    def _fail(self, stream: TextStream, error: Exception) -> None:
        self._end_request(stream.request.request_id)
        self._finish(stream, "error", None, f"delivering the output failed: {type(error).__name__}: {error}")
        with contextlib.suppress(Exception):  # the reader itself may be what is broken
            stream.reader.take(stream)

    def _process(self, stream: TextStream, update: TokenUpdate) -> None:
        stream.num_cached_tokens = max(stream.num_cached_tokens, update.num_cached_tokens)
        if stream.first_token_time is None and update.token_ids:
            stream.first_token_time = update.time
        if update.vector is not None:
            stream.vector = update.vector
        if update.prompt_logprobs is not None:
            self._take_prompt_logprobs(stream, *update.prompt_logprobs)
        if update.logprobs is not None and stream.completion.logprobs is not None:
            num_top = stream.request.params.logprobs or 0
            stream.completion.logprobs += [self._logprobs(row, num_top) for row in update.logprobs]
        known = stream.token_ids
        num_known = len(known)
        known += update.token_ids
        self._show_text(stream, update)
        if update.num_drafts:
            # A draft after a stop string does not count as accepted, as one after a stop token does not.
            stream.checked.append((update.num_drafts, min(update.num_accepted, len(known) - num_known)))

    def _show_text(self, stream: TextStream, update: TokenUpdate) -> None:
        """Make the text of the new tokens, and end the stream at a stop string or its last token."""
        known, matcher = stream.token_ids, stream.matcher
        if stream.is_text_late and update.finish_reason is None:
            return
        # A stop token is part of the tokens but not of the text.
        num_texts = len(known) - (update.finish_reason == "stop" and bool(update.token_ids))
        if matcher is None:
            stream.show(stream.detokenizer.add(known[stream.num_shown : num_texts]))
            stream.num_shown = num_texts
        while matcher is not None and stream.num_shown < num_texts:
            stream.num_shown += 1
            stream.show(matcher.add(stream.detokenizer.add(known[stream.num_shown - 1 : stream.num_shown])))
            if matcher.matched is not None:
                # Tokens after the stop string in the same update are not part of the output.
                del known[stream.num_shown :]
                if stream.completion.logprobs is not None:
                    del stream.completion.logprobs[stream.num_shown :]
                self._end_request(update.request_id)
                self._finish(stream, "stop", matcher.matched, None)
                return
        if update.finish_reason is None:
            return
        rest = stream.detokenizer.flush()
        if matcher is not None:
            rest = matcher.add(rest)
            if matcher.matched is not None:
                stream.show(rest)
                self._finish(stream, "stop", matcher.matched, None)
                return
            rest += matcher.flush()
        stream.show(rest)
        self._finish(stream, update.finish_reason, update.stop_reason, update.error)

    def _take_prompt_logprobs(self, stream: TextStream, first_position: int, rows: list[LogprobRow]) -> None:
        """Positions may come again after a preemption; the first value of each is kept."""
        num_top = stream.request.params.prompt_logprobs or 0
        if stream.prompt_logprobs is None:
            stream.prompt_logprobs = [None]
        known = stream.prompt_logprobs
        for position, row in enumerate(rows, first_position):
            if position == len(known):
                known.append(self._logprobs(row, num_top))

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

    def _finish(
        self, stream: TextStream, finish: FinishReason, stop_reason: int | str | None, error: str | None
    ) -> None:
        completion, submission = stream.completion, stream.submission
        completion.finish_reason, completion.stop_reason = finish, stop_reason
        stream.error = error
        self.streams.pop(stream.request.request_id, None)
        if not any(request.request_id in self.streams for request in submission.requests):
            with self._lock:
                # Otherwise another request has taken the id by now.
                if self.submissions.get(submission.request_id) is submission:
                    del self.submissions[submission.request_id]
