"""A request's way through the engine: checked, counted, started, read piece by piece, and ended whatever happens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from fastapi import Request

from slipstream.engine.client import EngineClient, Prompt, Submission
from slipstream.errors import EngineError, RequestError
from slipstream.server.errors import ApiError
from slipstream.server.metrics import ServerMetrics
from slipstream.types import RequestOutput, SamplingParams


class ClientGone(Exception):  # noqa: N818  not an error of ours
    """Nobody waits for the answer any more."""


@dataclass
class Generation:
    """The prompts of one HTTP request on their way through the engine."""

    submissions: list[Submission]
    latest: dict[int, RequestOutput] = field(default_factory=dict)  # by place of the prompt

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(s.requests[0].prompt_token_ids) for s in self.submissions)

    @property
    def num_output_tokens(self) -> int:
        return sum(len(choice.token_ids) for output in self.latest.values() for choice in output.outputs)

    @property
    def num_cached_tokens(self) -> int:
        return sum(output.num_cached_tokens for output in self.latest.values())


class Gate:
    """Admits generations while there is room, and counts those that are under way."""

    def __init__(self, client: EngineClient, metrics: ServerMetrics, max_queue: int) -> None:
        self.client = client
        self._metrics = metrics
        self._max_open = client.config.scheduler.max_num_seqs + max_queue
        self.num_open = 0  # continuations that have not ended
        self.num_aborted = 0  # because nobody waits for them any more

    async def prepare(
        self, prompts: Sequence[Prompt], params: SamplingParams, request_id: str, priority: int
    ) -> Generation:
        """Check everything before anything runs. Long texts are tokenised off the event loop."""
        wanted = len(prompts) * params.n
        if self.num_open + wanted > self._max_open:
            self._metrics.refused.inc()
            raise ApiError(
                429,
                f"{self.num_open} requests are waiting or running, {self._max_open} are allowed; try again later",
                headers={"Retry-After": "1"},
            )
        submissions = []
        for i, prompt in enumerate(prompts):
            own_id = request_id if len(prompts) == 1 else f"{request_id}-{i}"
            try:
                submissions.append(await asyncio.to_thread(self.client.prepare, prompt, params, own_id, priority))
            except RequestError as error:
                prefix = f"prompt {i}: " if len(prompts) > 1 else ""
                raise ApiError(400, f"{prefix}{error}", param="prompt") from error
        return Generation(submissions)

    @asynccontextmanager
    async def run(
        self, generation: Generation, every_token: bool
    ) -> AsyncIterator[AsyncIterator[tuple[int, RequestOutput]]]:
        """Start all prompts; inside the context their outputs arrive. Whatever has not ended at its end is aborted."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[tuple[int, RequestOutput]] = asyncio.Queue()
        open_ids: dict[int, Submission] = {}
        num_open = sum(len(s.requests) for s in generation.submissions)
        self.num_open += num_open
        try:
            for i, submission in enumerate(generation.submissions):
                open_ids[i] = submission
                self.client.submit(submission, _sink(loop, arrived, i), every_token=every_token)
            yield self._outputs(generation, arrived, open_ids)
        finally:
            self.num_open -= num_open
            for submission in open_ids.values():
                self.num_aborted += len(submission.requests)
                self.client.abort(submission.request_id)

    async def _outputs(
        self,
        generation: Generation,
        arrived: asyncio.Queue[tuple[int, RequestOutput]],
        open_ids: dict[int, Submission],
    ) -> AsyncIterator[tuple[int, RequestOutput]]:
        last_at: dict[int, float] = {}
        while open_ids:
            i, output = await arrived.get()
            generation.latest[i] = output
            now = time.monotonic()
            if i in last_at:
                self._metrics.time_between_tokens.observe(now - last_at[i])
            last_at[i] = now
            if output.finished:
                del open_ids[i]
                self._metrics.finished(output)
            if output.error is not None:
                # "abort" with a reason is the engine's end, not the request's fault.
                failed = any(choice.finish_reason == "error" for choice in output.outputs)
                raise ApiError(500, output.error) if failed else EngineError(output.error)
            yield i, output


def _sink(loop: asyncio.AbstractEventLoop, arrived: asyncio.Queue[tuple[int, RequestOutput]], i: int):  # type: ignore[no-untyped-def]
    def sink(output: RequestOutput) -> None:
        with suppress(RuntimeError):  # the event loop is closed: nobody reads any more
            loop.call_soon_threadsafe(arrived.put_nowait, (i, output))

    return sink


async def collect(gate: Gate, generation: Generation, request: Request) -> None:
    """Run to the end without streaming; ``generation.latest`` has the outputs. Ends early if the client hangs up."""

    async def drive() -> None:
        async with gate.run(generation, every_token=False) as outputs:
            async for _ in outputs:
                pass

    driving, hung_up = asyncio.ensure_future(drive()), asyncio.ensure_future(_hang_up(request))
    try:
        await asyncio.wait((driving, hung_up), return_when=asyncio.FIRST_COMPLETED)
        if not driving.done():
            raise ClientGone
        driving.result()
    finally:
        for task in (driving, hung_up):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _hang_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
