"""The scheduler: by priority, then first come, first served; decodes before prompts; preemption when pages run out.

A new step may be requested while others are in flight. The scheduler then works on upper bounds, and the row and pages
of a request are released only after its last step is collected.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

from slipstream.config import CacheConfig, SchedulerConfig
from slipstream.errors import RequestError
from slipstream.host_drafting import HostProposer
from slipstream.output import TokenUpdates
from slipstream.plan import Composition, StepPlan, StepResult
from slipstream.request import Request
from slipstream.scheduler.admission import Admission, Queues
from slipstream.scheduler.collected_step import TokenCollector
from slipstream.scheduler.draft_ledger import DraftLedger
from slipstream.scheduler.draft_length import DraftLength
from slipstream.scheduler.open_plan import OpenPlan
from slipstream.scheduler.pages import PagePool, check_fits, root_hash
from slipstream.scheduler.prompt_budget import PromptBudget
from slipstream.scheduler.request_pages import RequestPages
from slipstream.scheduler.request_state import NO_ROW, RequestState
from slipstream.scheduler.stats import SchedulerStats
from slipstream.scheduler.steady_batch import SteadyBatch


class _Launched(NamedTuple):
    """The requests of a step, until it is collected."""

    states: Sequence[RequestState]
    decodes_only: bool


class Scheduler:
    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        draft_length: DraftLength | None = None,
        host_proposer: HostProposer | None = None,
    ) -> None:
        self.config, self._cache = config, cache
        self.drafts = DraftLedger(config, draft_length, host_proposer)
        self.pool = PagePool(cache.num_pages, cache.page_size, config.prefix_caching)
        self._pages = RequestPages(config, self.pool, self.drafts)
        self._collector = TokenCollector(self._pages, has_drafts=config.num_drafts > 0)
        self.waiting: list[RequestState] = []  # sorted by rank
        self.running: list[RequestState] = []  # by rank
        self._leaving: list[RequestState] = []  # finished, but still in a step in flight
        self._requests: dict[str, RequestState] = {}
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._next_step_id = 0
        self._in_flight: dict[int, _Launched] = {}  # by step, oldest first
        self._next_arrival_idx = 0
        self._recent: dict[Composition, Composition] = {}  # one object for equal compositions
        self._steady: SteadyBatch | None = None  # if the newest step can be repeated
        self._totals = SchedulerStats()
        self.prompts = PromptBudget(config)
        queues = Queues(self.waiting, self.running, self._free_rows)
        self._admission = Admission(config, self._pages, self.drafts, queues, self._totals)

    # --- scheduling and collecting steps ---------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step, or None if there is nothing to launch before older steps are collected."""
        steady = self._steady
        if steady is None or steady.lengths != self.drafts.length.next_lengths() or not steady.can_repeat():
            return self._decide()
        return self._launch(steady.repeat(self._next_step_id), steady.states, decodes_only=True)

    def _decide(self) -> StepPlan | None:
        """The next step from scratch: requests may arrive, end or grow."""
        self._steady = None
        if self._must_drain() or not self._reserve_pages() or not self._make_room_for_urgent():
            self._totals.num_drains += 1
            return None
        opened, lengths = OpenPlan(), self.drafts.length.next_lengths()
        decodes, prefills = self._split_running()
        # Decodes first: each needs one token and its drafts, and users are reading their text.
        num_drafts = self.drafts.count_checked(lengths, decodes)
        if prefills or (self.waiting and self._free_rows):
            num_tokens = (1 + num_drafts) * len(decodes)
            room = self.prompts.room(decodes, num_tokens, lengths.make if self.config.num_drafts else 0)
            opened.add_decodes(decodes, num_drafts)
            self._admission.add_prompts(opened, prefills, room)
        else:
            opened.add_decodes(decodes, num_drafts)
        if not opened.states:
            return None
        has_prompts = len(opened.states) > len(decodes)
        next_drafts = self.drafts.plan_next(lengths, opened, decodes, has_prompts)
        is_exact = self._needs_exact_lengths(has_prompts)
        plan = opened.close(self._next_step_id, self._recent, *next_drafts, is_exact, self._pages.count_common)
        # The next step verifies what this one proposes. A request may be admitted while one waits and a row is free.
        stays = num_drafts == min(lengths.check, next_drafts.num_proposed) and not next_drafts.num_caught_up
        may_admit = bool(self.waiting and self._free_rows)
        if stays and not (has_prompts or prefills or is_exact or may_admit):
            self._steady = SteadyBatch(plan, opened.states, num_drafts, lengths)
        return self._launch(plan, opened.states, decodes_only=not has_prompts)

    def _launch(self, plan: StepPlan, states: Sequence[RequestState], decodes_only: bool) -> StepPlan:
        self._next_step_id += 1
        self._in_flight[plan.step_id] = _Launched(states, decodes_only)
        self.drafts.launched(plan, states)
        return plan

    def collect(self, result: StepResult) -> TokenUpdates:
        """Process the tokens of a collected step; upper bounds become exact."""
        states, decodes_only = self._in_flight.pop(result.plan.step_id)
        self.drafts.note_gaps(result.plan, states)
        all_go_on = decodes_only and not any(result.statuses) and all(result.token_ids)
        if all_go_on and all(state.gets_only_tokens for state in states):
            updates = self._collector.take_all(result, states)
        else:
            updates = self._collector.take_each(result, states)
            for update in updates.others.values():
                state = self._requests[update.request_id]
                if update.finish_reason is not None:
                    self._retire(state)
                elif update.token_ids:
                    state.note_first_tokens()
        if self._leaving:
            self._release_leaving(result.plan.step_id + 1)
        self.drafts.collected(result)
        return updates

    def update_draft_length(self) -> None:
        """Work that the next step need not wait for; called while the device is busy."""
        self.drafts.update_length()

    def record_seconds(self, plan: StepPlan, seconds: float) -> None:
        """The duration of a step that had the device for itself."""
        self.drafts.record_seconds(plan, seconds)

    def observe_seconds(self, plan: StepPlan, seconds: float) -> None:
        """How long the device took for a step, among others in flight."""
        self.prompts.observe(plan, seconds)

    # --- requests ----------------------------------------------------------------------------------

    def add(self, request: Request, cache_key: bytes = b"") -> None:
        """``cache_key``: what cached keys and values of its prompt depend on beside the tokens."""
        if request.request_id in self._requests:
            raise RequestError(f"request id '{request.request_id}' is already in use; choose another")
        check_fits(request, self._cache)
        state = RequestState(request, self._next_arrival_idx, list(request.prompt_token_ids), root_hash(cache_key))
        self.drafts.enter(state)
        self._next_arrival_idx += 1
        self._requests[request.request_id] = state
        self._steady = None
        bisect.insort(self.waiting, state, key=_rank)

    def finish(self, request_id: str) -> bool:
        """End a request from outside: an abort, or a stop string in its text. False if it is unknown."""
        state = self._requests.get(request_id)
        if state is None:
            return False
        self._retire(state)
        self._release_leaving(next(iter(self._in_flight), self._next_step_id))
        return True

    @property
    def prefix_caching_is_refused(self) -> bool:
        return bool(self.config.prefix_caching_refused)

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    @property
    def stats(self) -> SchedulerStats:
        totals = self._totals
        totals.num_waiting, totals.num_running = len(self.waiting), len(self.running)
        totals.num_free_pages = self.pool.num_free
        totals.draft_length = self.drafts.num_checked
        return totals

    # --- parts of a decision ----------------------------------------------------------------------

    def _split_running(self) -> tuple[list[RequestState], list[RequestState]]:
        """Decodes and prefills among the running requests that can use another step."""
        wanting = [s for s in self.running if len(s.token_ids) + s.num_draws_in_flight < s.max_total]
        prefills = [s for s in wanting if s.num_tokens_bound - s.num_computed > 1]
        return [s for s in wanting if s not in prefills] if prefills else wanting, prefills

    def _must_drain(self) -> bool:
        """Whether the next step needs exact lengths, which are only bounds while steps are in flight."""
        exact = self.config.exact_lengths
        if exact == "never" or not self._in_flight:
            return False
        may_admit = bool(self.waiting and self._free_rows)
        return exact == "always" or may_admit or any(s.num_tokens_bound - s.num_computed > 1 for s in self.running)

    def _needs_exact_lengths(self, has_prompts: bool) -> bool:
        exact = self.config.exact_lengths
        is_exact = exact == "always" or (exact == "prefill" and has_prompts)
        assert not (is_exact and self._in_flight)
        return is_exact

    # --- preemption -------------------------------------------------------------------------------

    def _reserve_pages(self) -> bool:
        """Reserve pages for the next step of every running request; False if older steps must be collected first."""
        # Most have the pages of their next tokens already, and some are launched up to their limit.
        needy = [s for s in self.running if s.num_slots_left < 0 and s.can_use_step]
        for state in needy:
            while state.row != NO_ROW and not self._pages.reserve(state):
                if self._in_flight:
                    return False  # a step in flight may end a request; bounds only decrease
                self._preempt(self.running[-1])
        if needy:
            self._pages.top_up(self.running)
        return True

    def _make_room_for_urgent(self) -> bool:
        """Preempt the lowest running request for a waiting one of higher priority; False to collect first."""
        while self.waiting and self.running:
            urgent, victim = self.waiting[0], self.running[-1]
            fits = self._pages.num_first(urgent) <= self.pool.num_free and bool(self._free_rows)
            if fits or urgent.request.priority >= victim.request.priority:
                return True
            if self._in_flight:
                return False
            self._preempt(victim)
        return True

    def _preempt(self, state: RequestState) -> None:
        """Return a request to the waiting queue. Its tokens stay; evicted keys are computed again."""
        self._steady = None
        self.running.remove(state)
        self._free(state)
        state.num_computed = 0
        bisect.insort(self.waiting, state, key=_rank)
        self._totals.num_preemptions += 1

    # --- retiring ---------------------------------------------------------------------------------

    def _retire(self, state: RequestState) -> None:
        """No more steps for this request. A row that no later step selects is inert, so the device needs no message."""
        state.finished, state.gets_only_tokens = True, False
        self._steady = None
        if state.row == NO_ROW:
            self.waiting.remove(state)
            del self._requests[state.request.request_id]
        elif state in self.running:
            self.running.remove(state)
            having = (step_id for step_id, step in reversed(self._in_flight.items()) if state in step.states)
            state.last_step_id = next(having, -1)
            self._leaving.append(state)

    def _release_leaving(self, num_collected: int) -> None:
        """Release rows and pages of requests whose last step is among the first ``num_collected``."""
        for state in [s for s in self._leaving if s.last_step_id < num_collected]:
            self._steady = None
            self._leaving.remove(state)
            self._free(state)
            del self._requests[state.request.request_id]

    def _free(self, state: RequestState) -> None:
        self._pages.release(state)
        self._free_rows.append(state.row)
        state.row = NO_ROW

    def check_idle(self) -> None:
        """When idle, every row and page must be free."""
        if self._requests or self._in_flight:
            raise RuntimeError("check_idle with requests present")
        if num_lost := self.config.max_num_seqs - len(self._free_rows):
            raise RuntimeError(f"leak: {num_lost} rows")
        self._pages.check_idle()


def _rank(state: RequestState) -> tuple[int, int]:
    return state.rank
