"""A request's way through the engine: checked, counted, started, read piece by piece, and ended whatever happens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Request

from slipstream.engine.client import EngineClient, Prompt, Submission
from slipstream.errors import EngineError, RequestError
from slipstream.server.errors import ApiError
from slipstream.server.metrics import ServerMetrics
from slipstream.types import DraftStats, RequestOutput, SamplingParams

T = TypeVar("T")


class ClientGone(Exception):  # noqa: N818  not an error of ours
    """Nobody waits for the answer any more."""


@dataclass
class Generation:
    """The prompts of one HTTP request on their way through the engine."""

    submissions: list[Submission] = field(default_factory=list)
    latest: dict[int, RequestOutput] = field(default_factory=dict)  # by place of the prompt
    num_reserved: int = 0  # places in the queue

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(s.requests[0].prompt_token_ids) for s in self.submissions)

    @property
    def num_output_tokens(self) -> int:
        return sum(len(choice.token_ids) for output in self.latest.values() for choice in output.outputs)

    @property
    def num_cached_tokens(self) -> int:
        return sum(output.num_cached_tokens for output in self.latest.values())

    @property
    def drafts(self) -> list[DraftStats]:
        """Of every choice; empty where the engine does not draft."""
        choices = [choice for output in self.latest.values() for choice in output.outputs]
        return [choice.speculation for choice in choices if choice.speculation is not None]


class _Mailbox:
    """The latest output of each prompt. A reader that falls behind finds one output with all that is new in it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, RequestOutput] = {}
        self._arrived = asyncio.Event()
        self._failure: Exception | None = None

    def sink(self, i: int) -> Callable[[RequestOutput], None]:
        """What the engine's output thread calls."""

        def put(output: RequestOutput) -> None:
            with suppress(RuntimeError):  # the event loop is closed: nobody reads any more
                self._loop.call_soon_threadsafe(self._put, i, output)

        return put

    def _put(self, i: int, output: RequestOutput) -> None:
        if (older := self._waiting.pop(i, None)) is not None:
            for choice, before in zip(output.outputs, older.outputs, strict=True):
                choice.delta_text = before.delta_text + choice.delta_text
        self._waiting[i] = output
        self._arrived.set()

    def fail(self, failure: Exception) -> None:
        """What the reader gets from here on."""
        self._failure = failure
        self._arrived.set()

    async def get(self) -> tuple[int, RequestOutput]:
        while not self._waiting and self._failure is None:
            self._arrived.clear()
            await self._arrived.wait()
        if self._failure is not None:
            raise self._failure
        i = next(iter(self._waiting))
        return i, self._waiting.pop(i)


def _ending() -> ApiError:
    return ApiError(503, "the server is shutting down", headers={"Retry-After": "5"})


class Gate:
    """Admits generations while there is room, and counts those that are under way."""

    def __init__(self, client: EngineClient, metrics: ServerMetrics, max_queue: int) -> None:
        self.client = client
        self._metrics = metrics
        self._max_open = client.config.scheduler.max_num_seqs + max_queue
        self.num_open = 0  # continuations that have not ended
        self.num_aborted = 0  # because nobody waits for them any more
        self.is_closed = False
        self._mailboxes: set[_Mailbox] = set()

    def close(self) -> None:
        """The server ends: whoever still waits for an answer is told so, and nobody is let in any more."""
        self.is_closed = True
        for mailbox in self._mailboxes:
            mailbox.fail(_ending())

    async def prepare(
        self, prompts: Sequence[Prompt], params: SamplingParams, request_id: str, priority: int
    ) -> Generation:
        """Take places in the queue, and check everything before anything runs. Tokenising is off the event loop."""
        generation = self._reserve(len(prompts) * params.n)
        try:
            for i, prompt in enumerate(prompts):
                own_id = request_id if len(prompts) == 1 else f"{request_id}-{i}"
                try:
                    made = await asyncio.to_thread(self.client.prepare, prompt, params, own_id, priority)
                except RequestError as error:
                    raise ApiError(400, f"prompt {i}: {error}" if len(prompts) > 1 else str(error)) from error
                generation.submissions.append(made)
        except BaseException:
            self.release(generation)
            raise
        return generation

    def _reserve(self, wanted: int) -> Generation:
        if self.is_closed:
            raise _ending()
        if wanted > self._max_open:
            raise ApiError(400, f"{wanted} continuations at once are more than the {self._max_open} this server allows")
        if self.num_open + wanted > self._max_open:
            self._metrics.refused.inc()
            raise ApiError(
                429,
                f"{self.num_open} requests are waiting or running, {self._max_open} are allowed; try again later",
                headers={"Retry-After": "1"},
            )
        self.num_open += wanted
        return Generation(num_reserved=wanted)

    def release(self, generation: Generation) -> None:
        """Give the places back; once is enough."""
        self.num_open -= generation.num_reserved
        generation.num_reserved = 0

    @asynccontextmanager
    async def run(
        self, generation: Generation, every_token: bool
    ) -> AsyncIterator[AsyncIterator[tuple[int, RequestOutput]]]:
        """Start all prompts; inside the context their outputs arrive. Whatever has not ended at its end is aborted."""
        mailbox = _Mailbox()
        open_ids: dict[int, Submission] = {}
        self._mailboxes.add(mailbox)
        try:
            if self.is_closed:
                self.num_aborted += generation.num_reserved
                raise _ending()
            for i, submission in enumerate(generation.submissions):
                self.client.submit(submission, mailbox.sink(i), every_token=every_token)
                open_ids[i] = submission
            yield self._outputs(generation, mailbox, open_ids)
        finally:
            self._mailboxes.discard(mailbox)
            self.release(generation)
            for submission in open_ids.values():
                self.num_aborted += len(submission.requests)
                self._metrics.ended.labels("abort").inc(len(submission.requests))
                self.client.abort(submission.request_id)

    async def _outputs(
        self, generation: Generation, mailbox: _Mailbox, open_ids: dict[int, Submission]
    ) -> AsyncIterator[tuple[int, RequestOutput]]:
        last: dict[tuple[int, int], tuple[float, int]] = {}  # when a choice had news, and its tokens then
        while open_ids:
            i, output = await mailbox.get()
            generation.latest[i] = output
            now = time.monotonic()
            for choice in output.outputs:
                key, num_tokens = (i, choice.index), len(choice.token_ids)
                if key in last and num_tokens > last[key][1]:
                    self._metrics.time_between_tokens.observe((now - last[key][0]) / (num_tokens - last[key][1]))
                if key not in last or num_tokens > last[key][1]:
                    last[key] = (now, num_tokens)
            if output.finished:
                del open_ids[i]
                self._metrics.finished(output)
            if output.error is not None:
                # "abort" with a reason is the engine's end, not the request's fault.
                failed = any(choice.finish_reason == "error" for choice in output.outputs)
                raise ApiError(500, output.error) if failed else EngineError(output.error)
            yield i, output


async def collect(gate: Gate, generation: Generation, request: Request) -> None:
    """Run to the end without streaming; ``generation.latest`` has the outputs. Ends early if the client hangs up."""

    async def drive() -> None:
        async with gate.run(generation, every_token=False) as outputs:
            async for _ in outputs:
                pass

    await unless_gone(drive(), request)


async def unless_gone(work: Coroutine[Any, Any, T], request: Request) -> T:
    """What the work gives, unless the client hangs up first: then the work is cancelled."""
    working, hung_up = asyncio.ensure_future(work), asyncio.ensure_future(_hang_up(request))
    try:
        await asyncio.wait((working, hung_up), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, hung_up):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _hang_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
