"""The engine core: keeps the device fed with steps and returns collected tokens. Synchronous and single-threaded."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from slipstream.engine.stats import EngineStats
from slipstream.engine.step_clock import StepClock
from slipstream.engine.trace import open_trace
from slipstream.errors import RequestError
from slipstream.grammar.constraints import Constraints
from slipstream.output import TokenUpdate, TokenUpdates
from slipstream.plan import StepPlan, StepResult
from slipstream.request import Request
from slipstream.runner.held_step import HeldStep, ReleasedStep
from slipstream.runner.program import LaunchedStep
from slipstream.runner.runner import Runner
from slipstream.scheduler.scheduler import Scheduler

# How long the loop waits for grammars and masks before it looks for messages again.
_PATIENCE_S = 0.005


class EngineCore:
    def __init__(
        self, scheduler: Scheduler, runner: Runner, steps_in_flight: int, constraints: Constraints | None = None
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self._max_in_flight = steps_in_flight
        self._constraints = constraints
        self._in_flight: deque[LaunchedStep | HeldStep] = deque()  # the newest may be held
        self._failed: list[TokenUpdate] = []  # requests whose grammars failed, to be reported
        self.clock = StepClock(steps_in_flight, runner.device.keeps_time)
        self._stats = EngineStats(prefix_cache_refused=int(scheduler.prefix_caching_is_refused))
        self.trace = open_trace(runner.device)

    def prepare_to_serve(self) -> None:
        """Do before the first request what would hold up others later."""
        if self._constraints is not None:
            self._constraints.prepare()

    def add(self, request: Request) -> None:
        if request.params.extra:
            self.runner.check(request)
        if not request.is_constrained:
            self._schedule(request)
        elif self._constraints is None:
            raise RequestError("this engine has no end-of-sequence token or no tokenizer, so it takes no grammars")
        else:
            self._constraints.add(request)

    def _schedule(self, request: Request) -> None:
        self.scheduler.add(request, self.runner.cache_key(request))

    def finish(self, request_id: str) -> bool:
        """End a request from outside. Its tokens that are still in flight are dropped."""
        if self._constraints is not None and self._constraints.finish(request_id):
            return True
        return self.scheduler.finish(request_id)

    def use_idle_time(self, is_interrupted: Callable[[], bool] = lambda: False) -> bool:
        """Capture a graph that was deferred at startup, or time a step; False if nothing is left to do.

        A step that is being timed is given up once ``is_interrupted`` returns true.
        """
        return self.runner.idle_work.do_next(is_interrupted)

    @property
    def has_work(self) -> bool:
        is_compiling = self._constraints is not None and self._constraints.is_compiling
        return self.scheduler.has_requests or bool(self._in_flight) or is_compiling or bool(self._failed)

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
        if self._constraints is not None:
            self._take_compiled(self._constraints)
        may_launch = self._release_oldest()
        while may_launch and len(self._in_flight) < self._max_in_flight:
            with trace.host("schedule"):
                plan = self.scheduler.schedule()
            if plan is None:
                break
            with trace.host("launch"), trace.device(plan):
                self.clock.launching(plan.step_id)
                self._launch(plan)
            self._stats.num_steps += 1
            self._stats.num_tokens_computed += plan.num_tokens
            may_launch = self._release_oldest()
        oldest = self._in_flight[0] if self._in_flight else None
        if self._failed or oldest is None or isinstance(oldest, HeldStep):
            return self._take_failed()
        with trace.host("wait"):
            self.scheduler.update_draft_length()
            self._in_flight.popleft()
            result = oldest.collect()
        with trace.host("collect"):
            updates = self._take_in(result)
        now = time.monotonic()
        self._stats.step_s.add(now - start)
        self._stats.host_s.add(now - start - result.wait_s)
        is_usual = not isinstance(oldest, ReleasedStep) and not self.runner.newest_was_recorded
        self._note_seconds(result, is_usual)
        if self._max_in_flight == 1 and self.runner.device.keeps_time and is_usual:
            self.scheduler.record_seconds(result.plan, now - start)
        updates.set_time(now)
        self._stats.count_updates(updates)
        if not self.has_work:
            self.scheduler.check_idle()
        return updates

    def _note_seconds(self, result: StepResult, is_usual: bool) -> None:
        """Tell the scheduler how long a collected step took; not one that waited for masks, or was recorded."""
        step_id = result.plan.step_id
        if not is_usual or not self.clock.is_right:
            self.clock.forget(step_id)
        elif (seconds := self.clock.collected(step_id, result.wait_s)) is not None:
            self.scheduler.observe_seconds(result.plan, seconds)

    def _take_in(self, result: StepResult) -> TokenUpdates:
        constraints = self._constraints
        if constraints is None:
            return self.scheduler.collect(result)
        constraints.note_result(result)
        self._stats.mask_pause_s += result.pause_s
        updates = self.scheduler.collect(result)
        for request_id in updates.ended:
            constraints.finish(request_id)
        self._begin_masks()
        return updates

    # --- constrained requests ---------------------------------------------------------------------

    def _take_compiled(self, constraints: Constraints) -> None:
        """Schedule the requests whose grammars are compiled by now; without other work, wait for the first a little."""
        if not constraints.is_compiling:
            return
        has_other_work = self.scheduler.has_requests or bool(self._in_flight)
        for request, error in constraints.take_compiled(0.0 if has_other_work else _PATIENCE_S):
            try:
                if error:
                    raise RequestError(error)
                self._schedule(request)
            except RequestError as refusal:
                constraints.finish(request.request_id)
                self._failed.append(TokenUpdate(request.request_id, [], "error", error=str(refusal)))

    def _launch(self, plan: StepPlan) -> None:
        """All of a step, or the first half of one with constrained requests."""
        constraints = self._constraints
        if constraints is not None and not self._in_flight and constraints.concern(plan):
            # Before the launch: where the device is in step with the host, the forward pass runs in it.
            constraints.begin(plan)
        self._in_flight.append(self.runner.launch(plan))

    def _begin_masks(self) -> None:
        """Fill masks for the held step, if all steps before it are collected."""
        if self._in_flight and isinstance(held := self._in_flight[0], HeldStep):
            assert self._constraints is not None
            self._constraints.begin(held.plan)

    def _release_oldest(self) -> bool:
        """Launch the second half of the oldest step if it waits for masks. Whether another step may be launched."""
        if not self._in_flight or not isinstance(self._in_flight[-1], HeldStep):
            return True
        if not isinstance(held := self._in_flight[0], HeldStep):
            return False  # the steps before it are collected first
        assert self._constraints is not None
        start = time.monotonic()
        filled = self._constraints.take_masks(_PATIENCE_S)
        self._stats.mask_wait_s += time.monotonic() - start
        if filled is None:
            return False
        self._stats.num_masked_steps += 1
        with self.trace.host("masks"):
            self._in_flight[0] = self.runner.release(held, filled.masks)
        for request_id, error in filled.errors.items():
            if self.finish(request_id):
                self._failed.append(TokenUpdate(request_id, [], "error", error=error))
        return True

    def _take_failed(self) -> TokenUpdates:
        updates, self._failed = TokenUpdates.from_list(self._failed), []
        updates.set_time(time.monotonic())
        return updates
