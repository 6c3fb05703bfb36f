"""The engine core: keeps the device fed with steps and returns collected tokens. Synchronous and single-threaded."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from slipstream.engine.stats import EngineStats
from slipstream.engine.trace import open_trace
from slipstream.output import TokenUpdates
from slipstream.request import Request
from slipstream.runner.program import LaunchedStep
from slipstream.runner.runner import Runner
from slipstream.scheduler.scheduler import Scheduler


class EngineCore:
    def __init__(self, scheduler: Scheduler, runner: Runner, steps_in_flight: int) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self._max_in_flight = steps_in_flight
        self._in_flight: deque[LaunchedStep] = deque()
        self._stats = EngineStats(prefix_cache_refused=int(scheduler.prefix_caching_is_refused))
        self.trace = open_trace(runner.device)

    def add(self, request: Request) -> None:
        if request.params.extra:
            self.runner.check(request)
        self.scheduler.add(request, self.runner.cache_key(request))

    def finish(self, request_id: str) -> bool:
        """End a request from outside. Its tokens that are still in flight are dropped."""
        return self.scheduler.finish(request_id)

    def use_idle_time(self, is_interrupted: Callable[[], bool] = lambda: False) -> bool:
        """Capture a graph that was deferred at startup, or time a step; False if nothing is left to do.

        A step that is being timed is given up once ``is_interrupted`` returns true.
        """
        return self.runner.idle_work.do_next(is_interrupted)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_requests or bool(self._in_flight)

    @property
    def stats(self) -> EngineStats:
        now = self.scheduler.stats
        self._stats.num_preemptions, self._stats.num_drains = now.num_preemptions, now.num_drains
        self._stats.num_pages = self.scheduler.pool.num_usable
        self._stats.num_sync_violations = self.runner.device.sync_guard.num_violations
        graphs = self.runner.graphs
        self._stats.num_graphs, self._stats.num_missing_graphs = graphs.num_recorded, self.runner.idle_work.num_left
        self._stats.graph_bytes, self._stats.draft_length = graphs.memory.used, now.draft_length
        self._stats.num_running, self._stats.num_waiting = now.num_running, now.num_waiting
        self._stats.num_free_pages = now.num_free_pages
        self._stats.num_prompt_tokens, self._stats.num_cached_tokens = now.num_prompt_tokens, now.num_cached_tokens
        return self._stats

    def step(self) -> TokenUpdates:
        """Launch until enough steps are in flight, then collect the oldest one."""
        start, trace = time.monotonic(), self.trace
        while len(self._in_flight) < self._max_in_flight:
            with trace.host("schedule"):
                plan = self.scheduler.schedule()
            if plan is None:
                break
            with trace.host("launch"), trace.device(plan):
                self._in_flight.append(self.runner.launch(plan))
            self._stats.num_steps += 1
            self._stats.num_tokens_computed += plan.num_tokens
        if not self._in_flight:
            return TokenUpdates()
        with trace.host("wait"):
            self.scheduler.update_draft_length()
            result = self._in_flight.popleft().collect()
        with trace.host("collect"):
            updates = self.scheduler.collect(result)
        now = time.monotonic()
        self._stats.step_s.add(now - start)
        self._stats.host_s.add(now - start - result.wait_s)
        if self._max_in_flight == 1 and self.runner.device.keeps_time:
            self.scheduler.record_seconds(result.plan, now - start)
        updates.set_time(now)
        self._stats.count_updates(updates)
        if not self.has_work:
            self.scheduler.check_idle()
        return updates
