"""A server whose engine says what a test wrote down: everything but the steps is real."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx

from slipstream.config import EngineOptions
from slipstream.engine.build import EngineInfo
from slipstream.engine.client import EngineClient
from slipstream.engine.driver import Deliver
from slipstream.engine.resolve import resolve
from slipstream.engine.stats import EngineStats
from slipstream.models.tokenizer import Tokenizer
from slipstream.server.app import Server, create_app
from slipstream.server.settings import ServerSettings
from slipstream.types import Request, SamplingParams, TokenUpdate, TokenUpdates
from tests.test_config import CPU, MODEL

Step = tuple[str, int, int]  # text, drafts that were checked, drafts that were accepted


class ScriptedEngine:
    """Answers every request with the same steps, at once; the last one ends it."""

    def __init__(self, deliver: Deliver, tokenizer: Tokenizer, steps: Sequence[Step], options: dict[str, Any]) -> None:
        config = resolve(EngineOptions.from_dict(options), CPU, MODEL)
        self.info = EngineInfo(config, tokenizer, SamplingParams(), ())
        self.stats = EngineStats()
        self.requests: list[Request] = []
        self._deliver, self._steps = deliver, steps

    def add(self, request: Request) -> None:
        self.requests.append(request)
        assert self.info.tokenizer is not None
        for i, (text, num_drafts, num_accepted) in enumerate(self._steps, 1):
            token_ids = self.info.tokenizer.encode(text, add_special_tokens=False)
            update = TokenUpdate(request.request_id, token_ids, "length" if i == len(self._steps) else None)
            update.num_drafts, update.num_accepted = num_drafts, num_accepted
            if num_drafts:
                self.stats.count_drafts(num_drafts, num_accepted)
            self._deliver(TokenUpdates.of([update]))

    def finish(self, request_id: str) -> None:
        pass

    def close(self) -> None:
        pass


class ScriptedServer:
    def __init__(self, tokenizer: Tokenizer, steps: Sequence[Step], **options: Any) -> None:
        self.client = EngineClient(lambda deliver: ScriptedEngine(deliver, tokenizer, steps, options))
        self._app = create_app(Server(self.client, "tiny", ServerSettings()))

    @property
    def engine(self) -> ScriptedEngine:
        assert isinstance(self.client.running, ScriptedEngine)
        return self.client.running

    def http(self) -> httpx.AsyncClient:
        """Requests go into the application without a socket."""
        return httpx.AsyncClient(transport=httpx.ASGITransport(app=self._app), base_url="http://test")

    def close(self) -> None:
        self.client.close()
