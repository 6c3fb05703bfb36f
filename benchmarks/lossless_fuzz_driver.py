"""An engine whose steps a script calls, one after the other in one thread: the same seed is the same run.

Requests go through the client that ``LLM`` and the server use, the loop's own driver and the real output thread, which
is waited for after every step. Nothing depends on a clock. How late the engine learns that a stop string or an abort
has ended a request is drawn: other steps are launched meanwhile.
"""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from lossless_fuzz_requests import FuzzRequest
from slipstream.engine.build import Engine
from slipstream.engine.client import EngineClient, Submission
from slipstream.engine.driver import Add, Deliver, Driver, Finish, Message, Stop
from slipstream.engine.stats import EngineStats
from slipstream.errors import EngineError
from slipstream.output import RequestOutput, TokenUpdates
from slipstream.request import Request

MAX_STEPS = 20_000
_MAX_WAIT_S = 60.0


@dataclass
class Seen:
    """What the caller of a request has seen of it."""

    request: FuzzRequest
    submission: Submission
    was_aborted: bool = False  # by the script, before its end
    last: RequestOutput | None = None
    streamed: dict[int, str] = field(default_factory=dict)  # by continuation, the pieces of text put together
    num_after_end: int = 0  # outputs that came after the last one

    def take_output(self, output: RequestOutput) -> None:
        self.num_after_end += self.is_finished
        self.last = output
        for completion in output.outputs:
            self.streamed[completion.index] = self.streamed.get(completion.index, "") + completion.delta_text

    @property
    def is_finished(self) -> bool:
        return self.last is not None and self.last.finished


class SteppedEngine:
    """Replaces the engine's thread. ``most_late``: maximum steps until the end of a request is processed."""

    id_prefix = ""

    def __init__(self, engine: Engine, deliver: Deliver, seed: int, most_late: int) -> None:
        self.info = engine
        self.now = 0  # steps so far, and those that were skipped because there was nothing to compute
        self._core, self._deliver = engine.core, deliver
        self._random, self._most_late = random.Random(seed), most_late
        self._inbox: list[tuple[int, Message]] = []  # with the step from which on it can be read
        self._script: Script | None = None
        self._is_told = False  # whether the script has had its say before the next step
        self._was_read = threading.Event()
        self._mark = TokenUpdates()

    @property
    def stats(self) -> EngineStats:
        return self._core.stats

    def add(self, request: Request) -> None:
        self._inbox.append((self.now, Add(request)))

    def finish(self, request_id: str) -> None:
        self._inbox.append((self.now + self._random.randint(0, self._most_late), Finish(request_id)))

    def close(self) -> None:
        pass  # its steps are called by ``run``, which has ended

    def run(self, script: Script) -> None:
        """Until the script is over and every request has ended."""
        self._script, self._is_told = script, False
        Driver(self._core, self._receive, self._hand_on).run()

    def wait_for_output(self) -> None:
        """Until the output thread has processed everything so far."""
        self._was_read.clear()
        self._deliver(self._mark)
        if not self._was_read.wait(_MAX_WAIT_S):
            raise EngineError("the output thread hangs")

    def note_updates(self, updates: TokenUpdates) -> None:
        """Of the output thread, before it processes them, and after all that came before."""
        if updates is self._mark:
            self._was_read.set()

    def _hand_on(self, updates: TokenUpdates) -> None:
        self._deliver(updates)
        self.wait_for_output()

    def _receive(self, is_idle: bool) -> Message:
        assert self._script is not None
        while True:
            if not self._is_told:
                self._script.advance(self.now)
                self._is_told = True
            for i, (due, message) in enumerate(self._inbox):
                if due <= self.now:
                    del self._inbox[i]
                    return message
            if is_idle and not self._inbox and self._script.is_over:
                return Stop()
            self.now, self._is_told = self.now + 1, False
            if self.now - self._script.began_at > MAX_STEPS:
                raise EngineError("the requests do not come to an end")
            if not is_idle:
                raise queue.Empty


class Script:
    """Submits and aborts the requests of one engine when their time has come."""

    def __init__(self, client: EngineClient, engine: SteppedEngine, requests: Sequence[FuzzRequest]) -> None:
        self._client, self._engine = client, engine
        self.began_at = engine.now
        self._waiting = list(requests)
        self._to_abort: list[tuple[int, Seen]] = []
        self._named: dict[str, Seen] = {}  # the last that had the name
        self.seen: dict[int, Seen] = {}  # by the number of the request

    @property
    def is_over(self) -> bool:
        return not self._waiting and not self._to_abort

    def advance(self, now: int) -> None:
        now -= self.began_at
        while self._waiting and self._waiting[0].arrives_at <= now:
            self._submit(self._waiting.pop(0))
        for entry in [entry for entry in self._to_abort if entry[0] <= now]:
            self._to_abort.remove(entry)
            self._abort(entry[1])

    def _submit(self, request: FuzzRequest) -> None:
        if request.name is not None and (holder := self._named.get(request.name)) is not None:
            self._abort(holder)  # and the name is used again at once
        submission = self._client.prepare(request.prompt, request.params, request.name, request.priority)
        seen = self.seen[request.idx] = Seen(request, submission)
        self._client.submit(submission, seen.take_output, every_token=request.every_token)
        if request.name is not None:
            self._named[request.name] = seen
        if request.aborts_after is not None:
            self._to_abort.append((request.arrives_at + request.aborts_after, seen))

    def _abort(self, seen: Seen) -> None:
        if not seen.is_finished:
            seen.was_aborted = True
            self._client.abort(seen.submission.request_id)
            self._engine.wait_for_output()


class FuzzedEngine:
    """A client over a stepped engine."""

    def __init__(self, engine: Engine, seed: int = 0, most_late: int = 0) -> None:
        self.core = engine.core
        self.seen: dict[int, Seen] = {}  # of the last run, by the number of the request; also where it broke
        self.client = EngineClient(lambda deliver: self._start(engine, deliver, seed, most_late))

    def _start(self, engine: Engine, deliver: Deliver, seed: int, most_late: int) -> SteppedEngine:
        self._stepped = SteppedEngine(engine, deliver, seed, most_late)
        return self._stepped

    def run(self, requests: Sequence[FuzzRequest]) -> dict[int, Seen]:
        script = Script(self.client, self._stepped, requests)
        self.seen = script.seen
        with self.client.tapped(self._stepped.note_updates):
            self._stepped.run(script)
        return self.seen

    def close(self) -> None:
        self.client.close()


def run_alone(engine: FuzzedEngine, seen: Seen) -> Seen:
    """The same request by itself, to its end: with the seed that it was given, and as many tokens as it was allowed."""
    first = seen.submission.requests[0]
    given = {
        **seen.request.given,
        "seed": first.params.seed,
        "max_tokens": first.max_total_tokens - len(first.prompt_token_ids),
    }
    own = vars(seen.request) | {"given": given, "priority": 0, "arrives_at": 0, "aborts_after": None, "name": None}
    alone = FuzzRequest(**{**own, "every_token": True})
    return engine.run([alone])[alone.idx]
