"""The engine core: keeps the device fed with steps and hands out collected tokens. Synchronous and single-threaded."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from slipstream.runner.async_output import InFlightStep
from slipstream.runner.runner import Runner
from slipstream.scheduler.scheduler import Scheduler
from slipstream.types import Request, TokenUpdate


@dataclass(slots=True)
class EngineStats:
    num_steps: int = 0
    num_tokens_computed: int = 0  # prompt and output tokens that went through the model
    num_tokens_out: int = 0
    num_requests_finished: int = 0
    num_preemptions: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_free_pages: int = 0
    num_prompt_tokens: int = 0  # of all requests admitted so far
    num_cached_tokens: int = 0  # of those, found in the prefix cache

    @property
    def prefix_hit_rate(self) -> float:
        return self.num_cached_tokens / max(1, self.num_prompt_tokens)


class EngineCore:
    def __init__(self, scheduler: Scheduler, runner: Runner, steps_in_flight: int) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self._max_in_flight = steps_in_flight
        self._in_flight: deque[InFlightStep] = deque()
        self._stats = EngineStats()

    def add(self, request: Request) -> None:
        self.scheduler.add(request)

    def finish(self, request_id: str) -> bool:
        """End a request from outside. Tokens of it that are still in flight are dropped."""
        return self.scheduler.finish(request_id)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_requests or bool(self._in_flight)

    @property
    def stats(self) -> EngineStats:
        now = self.scheduler.stats
        self._stats.num_preemptions = now.num_preemptions
        self._stats.num_running, self._stats.num_waiting = now.num_running, now.num_waiting
        self._stats.num_free_pages = now.num_free_pages
        self._stats.num_prompt_tokens, self._stats.num_cached_tokens = now.num_prompt_tokens, now.num_cached_tokens
        return self._stats

    def step(self) -> list[TokenUpdate]:
        """Launch until enough steps are in flight, then collect the oldest one."""
        while len(self._in_flight) < self._max_in_flight and (plan := self.scheduler.schedule()) is not None:
            self._in_flight.append(self.runner.launch(plan))
            self._stats.num_steps += 1
            self._stats.num_tokens_computed += plan.num_tokens
        if not self._in_flight:
            return []
        updates = self.scheduler.collect(self._in_flight.popleft().collect())
        now = time.monotonic()
        for update in updates:
            update.time = now
            self._stats.num_tokens_out += len(update.token_ids)
            self._stats.num_requests_finished += update.finish_reason is not None
        if not self.has_work:
            self.scheduler.check_idle()
        return updates
