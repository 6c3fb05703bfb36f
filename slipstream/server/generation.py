"""The prompts of one HTTP request on their way through the engine, and the limit on requests under way."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.engine.admission import Submission
from slipstream.engine.client import EngineClient
from slipstream.engine.lowered_limits import warn_of_lowered_limits
from slipstream.engine.text_stream import TextStream
from slipstream.output import Completion, DraftStats
from slipstream.server.errors import ApiError
from slipstream.server.metrics import ServerMetrics


@dataclass
class Generation:
    submissions: list[Submission]
    streams: list[list[TextStream]] = field(default_factory=list)  # by index of the prompt, once started

    @property
    def num_continuations(self) -> int:
        return sum(len(submission.requests) for submission in self.submissions)

    @property
    def all_streams(self) -> list[TextStream]:
        return [stream for streams in self.streams for stream in streams]

    @property
    def completions(self) -> list[Completion]:
        return [stream.completion for stream in self.all_streams]

    @property
    def is_complete(self) -> bool:
        return len(self.streams) == len(self.submissions) and all(s.is_finished for s in self.all_streams)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(s.requests[0].prompt_token_ids) for s in self.submissions)

    @property
    def num_output_tokens(self) -> int:
        return sum(len(stream.token_ids) for stream in self.all_streams)

    @property
    def num_cached_tokens(self) -> int:
        return sum(max(stream.num_cached_tokens for stream in streams) for streams in self.streams if streams)

    @property
    def first_token_s(self) -> float | None:
        """From arrival to the first token of any choice."""
        found = [
            stream.first_token_time - stream.request.arrival_time
            for stream in self.all_streams
            if stream.first_token_time is not None
        ]
        return min(found, default=None)

    @property
    def warnings(self) -> list[str]:
        """Where it is served otherwise than asked: the first prompt's warning, and how many more prompts have it."""
        found = [text for s in self.submissions if (text := warn_of_lowered_limits(s.requests[0])) is not None]
        return found[:1] + ([f"the same holds for {len(found) - 1} more prompts"] if len(found) > 1 else [])

    @property
    def drafts(self) -> list[DraftStats]:
        """Of every choice; empty where the engine does not speculate."""
        for stream in self.all_streams:
            stream.count_drafts()
        return [choice.speculation for choice in self.completions if choice.speculation is not None]


def shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", headers={"Retry-After": "5"})


class Gate:
    """Admits requests while there is room, over all front ends together."""

    def __init__(self, client: EngineClient, metrics: ServerMetrics, max_queue: int) -> None:
        self._client = client
        self._metrics = metrics
        self._max_queue = max_queue
        self.is_closed = False
        self.num_open = 0  # in this front end
        self.num_aborted = 0  # because the client disconnected or the server ends

    @property
    def _max_open(self) -> int:
        return self._client.config.scheduler.max_num_seqs + self._max_queue

    def check_room(self, count: int) -> None:
        """Raise the error for the client if ``count`` more continuations cannot be taken now."""
        if self.is_closed:
            raise shutting_down()
        if count > self._max_open:
            raise ApiError(400, f"{count} continuations at once are more than the {self._max_open} this server allows")
        if (num_open := self._metrics.num_open) + count > self._max_open:
            raise ApiError(
                429,
                f"{num_open} requests are waiting or running, {self._max_open} are allowed; try again later",
                headers={"Retry-After": "1"},
            )

    def enter(self, count: int) -> None:
        self.num_open += count
        self._metrics.open(count)

    def leave(self, count: int) -> None:
        self.num_open -= count
        self._metrics.close(count)

    def abort(self, count: int) -> None:
        """Leave without a result."""
        self.leave(count)
        self.num_aborted += count
        self._metrics.end("abort", count)
