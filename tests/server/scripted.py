"""A server whose engine says what a test wrote down: everything but the steps is real."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from slipstream.config import EngineOptions
from slipstream.engine.build import EngineInfo
from slipstream.engine.client import EngineClient
from slipstream.engine.driver import Deliver
from slipstream.engine.resolve import resolve
from slipstream.engine.stats import EngineStats
from slipstream.output import LogprobRow, TokenUpdate, TokenUpdates
from slipstream.request import Request
from slipstream.sampling_params import SamplingParams
from slipstream.server.counters import SharedCounters
from slipstream.server.front_end import FrontEnd
from slipstream.server.front_end_process import open_listener
from slipstream.server.metrics import LAYOUT
from slipstream.server.settings import ServerSettings
from slipstream.text.tokenizer import Tokenizer
from tests.test_config import CPU, MODEL

Text = str | list[int] | Callable[[Request], str]
Step = tuple[Text, int, int]  # text or token ids, drafts that were checked, drafts that were accepted


class ScriptedEngine:
    """Answers every request with the same steps; the last one ends it. Each is an event of its own."""

    id_prefix = ""

    def __init__(self, deliver: Deliver, tokenizer: Tokenizer, steps: Sequence[Step], options: dict[str, Any]) -> None:
        config = resolve(EngineOptions.from_dict(options), CPU, MODEL)
        self.info = EngineInfo(config, tokenizer, SamplingParams(), ())
        self.stats = EngineStats()
        self.requests: list[Request] = []
        self.likeliest: Sequence[int] = (1, 2)  # token ids beside the chosen one
        self.deliver, self._steps = deliver, steps

    def steps_of(self, request: Request) -> Sequence[Step]:
        """A test may put something here that tells requests apart."""
        return self._steps

    def add(self, request: Request) -> None:
        self.requests.append(request)
        assert self.info.tokenizer is not None
        steps, updates = self.steps_of(request), list[TokenUpdate]()
        for i, (text, num_drafts, num_accepted) in enumerate(steps, 1):
            encode = self.info.tokenizer.encode
            text = text(request) if callable(text) else text
            token_ids = encode(text, add_special_tokens=False) if isinstance(text, str) else text
            update = TokenUpdate(request.request_id, token_ids, "length" if i == len(steps) else None)
            if request.params.logprobs is not None:
                update.logprobs = [self.logprob_row(token_id) for token_id in token_ids]
            update.num_drafts, update.num_accepted = num_drafts, num_accepted
            if num_drafts:
                self.stats.drafts.add(num_drafts, num_accepted)
            updates.append(update)
        self._deliver_next(updates)

    def _deliver_next(self, updates: list[TokenUpdate]) -> None:
        """The first of them, and the rest when the server has written what came of it."""
        self.deliver(TokenUpdates.from_list([updates.pop(0)]))
        if updates:
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._deliver_next, updates)

    def logprob_row(self, token_id: int) -> LogprobRow:
        """The token that was chosen is the second likeliest, with what ``likeliest`` says before and after it."""
        before, *others = self.likeliest
        values = [-2.0, -1.0, -2.0, *(-3.0 - i for i in range(len(others)))]
        return LogprobRow(2, [token_id, before, token_id, *others], values)

    def finish(self, request_id: str) -> None:
        pass

    def close(self) -> None:
        pass


class ScriptedServer:
    def __init__(
        self, tokenizer: Tokenizer, steps: Sequence[Step], settings: ServerSettings | None = None, **options: Any
    ) -> None:
        self.client = EngineClient(lambda deliver: ScriptedEngine(deliver, tokenizer, steps, options), in_line=True)
        self.settings = settings or ServerSettings()
        self._counters = SharedCounters(LAYOUT)

    @property
    def engine(self) -> ScriptedEngine:
        assert isinstance(self.client.running, ScriptedEngine)
        return self.client.running

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Listens inside this, at the address that it gives."""
        front_end = FrontEnd(self.client, "tiny", self.settings, self._counters)
        listener = open_listener("127.0.0.1", 0, is_shared=False)
        await front_end.start([listener])
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            await front_end.shut_down(lambda: True)

    @asynccontextmanager
    async def http(self) -> AsyncIterator[httpx.AsyncClient]:
        async with self.serving() as url, httpx.AsyncClient(base_url=url, timeout=30) as http:
            yield http

    def ask(self, method: str, path: str, **sent: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            async with self.http() as http:
                return await http.request(method, path, **sent)

        return asyncio.run(send())

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.ask("POST", path, json=body)

    def close(self) -> None:
        self.client.close()


def chunks_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """What the events of a stream say."""
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]
