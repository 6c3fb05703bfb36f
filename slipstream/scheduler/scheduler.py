"""The scheduler: by priority, then first come, first served; decodes before prompts; preemption when pages run out.

It may be asked for a new step while others are in flight. It then works on upper bounds, and what it gave to a request
(row and pages) comes back only after the last step that has the request is collected.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from slipstream.config import CacheConfig, SchedulerConfig
from slipstream.errors import RequestError
from slipstream.scheduler.pages import PagePool, check_fits, page_hashes
from slipstream.scheduler.request_state import NO_ROW, RequestState
from slipstream.types import (
    FinishReason,
    PageDiff,
    Request,
    RowInit,
    RowStatus,
    ScheduledRequest,
    StepPlan,
    StepResult,
    TokenUpdate,
)

_FINISH_REASONS: dict[RowStatus, FinishReason] = {
    RowStatus.STOPPED: "stop",
    RowStatus.LENGTH: "length",
    RowStatus.ERROR: "error",
}
_NAN_ERROR = "the model produced logits that are not numbers for this request; its output was discarded"


@dataclass(slots=True)
class SchedulerStats:
    num_waiting: int = 0
    num_running: int = 0
    num_free_pages: int = 0
    num_preemptions: int = 0
    num_drains: int = 0
    num_prompt_tokens: int = 0  # of all requests admitted so far, each counted once
    num_cached_tokens: int = 0  # of those, found in the prefix cache


class Scheduler:
    def __init__(self, config: SchedulerConfig, cache: CacheConfig) -> None:
        self._config = config
        self._cache = cache
        self.pool = PagePool(cache.num_pages, cache.page_size, config.prefix_caching)
        self.waiting: list[RequestState] = []  # by rank
        self.running: list[RequestState] = []  # by rank
        self._leaving: list[RequestState] = []  # finished, but a step in flight still has them
        self._requests: dict[str, RequestState] = {}
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._next_step_id = 0
        self._num_in_flight = 0
        self._next_arrival_idx = 0
        self._totals = SchedulerStats()

    # --- requests come and go ---------------------------------------------------------------------

    def add(self, request: Request) -> None:
        if request.request_id in self._requests:
            raise RequestError(f"request id '{request.request_id}' is already in use; choose another")
        check_fits(request, self._cache)
        state = RequestState(request, self._next_arrival_idx, list(request.prompt_token_ids))
        self._next_arrival_idx += 1
        self._requests[request.request_id] = state
        bisect.insort(self.waiting, state, key=_rank)

    def finish(self, request_id: str) -> bool:
        """End a request now, from outside: an abort, or a stop string in its text. False if it is not here."""
        state = self._requests.get(request_id)
        if state is None:
            return False
        self._retire(state)
        self._release_leaving(self._oldest_in_flight())
        return True

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    @property
    def stats(self) -> SchedulerStats:
        totals = self._totals
        totals.num_waiting, totals.num_running = len(self.waiting), len(self.running)
        totals.num_free_pages = self.pool.num_free
        return totals

    # --- a step -----------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step, or None when there is nothing to launch before older steps are collected."""
        if not self._reserve_pages_for_running() or not self._make_room_for_urgent():
            self._totals.num_drains += 1
            return None
        plan = StepPlan(self._next_step_id, [])
        budget = self._config.max_num_batched_tokens
        wanting = [state for state in self.running if state.wants_step]
        prefills = [state for state in wanting if state.num_tokens_bound - state.num_computed > 1]
        # Decodes first: each needs a token and its drafts, and they are the ones somebody is watching.
        decodes = [state for state in wanting if state not in prefills] if prefills else wanting
        # Equally many for all, for then one graph serves the batch; who has fewer drafts has empty places.
        most = self._config.num_drafts
        num_drafts = most if most and any(state.request.num_drafts(most) for state in decodes) else 0
        for state in decodes:
            budget -= self._schedule_one(plan, state, budget, num_drafts)
        for state in prefills:
            budget -= self._schedule_one(plan, state, budget)
        self._admit(plan, budget)
        if not plan.requests:
            return None
        self._next_step_id += 1
        self._num_in_flight += 1
        return plan

    def collect(self, result: StepResult) -> list[TokenUpdate]:
        """Take a finished step's tokens in, and turn bounds into facts."""
        self._num_in_flight -= 1
        updates = []
        remembers = self._config.prefix_caching
        for i, (scheduled, token_ids, status) in enumerate(
            zip(result.plan.requests, result.token_ids, result.statuses, strict=True)
        ):
            state = self._requests.get(scheduled.request_id)
            # Outputs are routed by the plan that launched them, not by who owns the row now.
            if state is None or state.generation != scheduled.generation:
                continue
            if scheduled.samples:
                state.num_draws_in_flight -= 1
                state.num_drafts_in_flight -= scheduled.num_drafts
                # The mirror took every draft for accepted.
                state.num_computed -= scheduled.num_drafts - max(0, len(token_ids) - 1)
            if state.finished:
                continue
            update = self._take_tokens(state, token_ids, status)
            if update is not None:
                update.num_drafts = result.num_drafts[i]
                update.num_accepted = min(result.num_accepted[i], len(update.token_ids))
            if result.prompt_logprobs and i in result.prompt_logprobs:
                update = update or TokenUpdate(scheduled.request_id, [])
                update.prompt_logprobs = result.prompt_logprobs[i]
            if update is not None and result.logprobs is not None and state.request.params.logprobs is not None:
                update.logprobs = result.logprobs[i][: len(update.token_ids)]
            if remembers and status is not RowStatus.ERROR:
                # The step's last token is drawn, not computed; a chunk of a prompt is computed to its end.
                self._remember_pages(state, len(state.token_ids) - 1 if scheduled.samples else _end(scheduled))
            if update is not None:
                updates.append(update)
                if update.finish_reason is not None:
                    self._retire(state)
        self._release_leaving(result.plan.step_id + 1)
        return updates

    def _take_tokens(self, state: RequestState, token_ids: list[int], status: RowStatus) -> TokenUpdate | None:
        request = state.request
        state.token_ids.extend(token_ids)
        reason = None if status is RowStatus.RUNNING else _FINISH_REASONS.get(status)
        stop_reason: int | None = None
        if reason != "error" and request.stop_token_ids:
            # The device knows only the first few stop ids; a longer list is completed here.
            end = next((i for i, token_id in enumerate(token_ids) if token_id in request.stop_token_ids), None)
            if end is not None:
                reason, stop_reason = "stop", token_ids[end]
                if end + 1 < len(token_ids):
                    del state.token_ids[end + 1 - len(token_ids) :]
                    token_ids = token_ids[: end + 1]
        if not token_ids and reason is None:
            return None
        error = _NAN_ERROR if reason == "error" else None
        return TokenUpdate(request.request_id, token_ids, reason, stop_reason, error, state.num_cached_tokens or 0)

    # --- one request's share ----------------------------------------------------------------------

    def _schedule_one(self, plan: StepPlan, state: RequestState, budget: int, num_drafts: int = 0) -> int:
        computed, bound = state.num_computed, state.num_tokens_bound
        num_tokens = bound - computed  # whose keys and values no launched step computes: 1 for a decode
        if num_tokens > 1 or budget < 1:
            num_tokens = min(num_tokens, budget, self._config.max_prefill_chunk)
        if num_tokens <= 0:
            return 0
        samples = computed + num_tokens == bound
        num_tokens += num_drafts
        request_id, generation, row = state.request.request_id, state.generation, state.row
        plan.requests.append(ScheduledRequest(request_id, generation, row, num_tokens, computed, samples, num_drafts))
        if len(state.page_ids) > state.num_staged_pages:
            new_pages = state.page_ids[state.num_staged_pages :]
            plan.page_diffs.append(PageDiff(state.row, state.num_staged_pages, new_pages))
            state.num_staged_pages = len(state.page_ids)
        state.num_computed += num_tokens
        state.num_draws_in_flight += samples
        state.num_drafts_in_flight += num_drafts
        state.last_step_id = plan.step_id
        return num_tokens

    def _admit(self, plan: StepPlan, budget: int) -> None:
        """Move waiting requests in while rows, budget, staging space and pages for all their tokens last."""
        num_staged = 0
        while self.waiting and self._free_rows and budget > 0:
            state = self.waiting[0]
            num_staged += len(state.token_ids)
            cached = self._find_cached(state)
            needed = self.pool.pages_for(self._num_slots(state, 1)) - len(cached)
            room = self.pool.num_free - self.pool.num_held_by_nobody(cached)
            if needed > room or num_staged > self._config.max_model_len:
                return
            self.waiting.pop(0)
            self._move_in(plan, state, cached, needed)
            budget -= self._schedule_one(plan, state, budget)

    def _move_in(self, plan: StepPlan, state: RequestState, cached: list[int], num_new_pages: int) -> None:
        request = state.request
        self.pool.hold(cached)
        state.page_ids = cached + self.pool.take(num_new_pages)
        state.num_computed = len(cached) * self.pool.page_size
        state.num_remembered_pages = len(cached)
        if state.num_cached_tokens is None:
            state.num_cached_tokens = state.num_computed
            self._totals.num_prompt_tokens += len(request.prompt_token_ids)
            self._totals.num_cached_tokens += state.num_computed
        state.row = self._free_rows.pop()
        state.generation += 1
        bisect.insort(self.running, state, key=_rank)
        plan.row_inits.append(
            RowInit(state.row, request, token_ids=tuple(state.token_ids), num_computed=state.num_computed)
        )

    # --- the prefix cache -------------------------------------------------------------------------

    def _find_cached(self, state: RequestState) -> list[int]:
        """Pages that hold the beginning of its tokens. The last token is always computed: its logits are wanted."""
        if not self._config.prefix_caching or not state.request.may_use_cache:
            return []
        num_pages = (len(state.token_ids) - 1) // self.pool.page_size
        found = self.pool.find(self._hashes(state, num_pages))
        if found and self._config.drafts_look_ahead and state.request.num_drafts(self._config.num_drafts):
            found.pop()  # it may have been followed by another token when the drafter filled it
        return found

    def _remember_pages(self, state: RequestState, num_computed: int) -> None:
        """Offer to the cache the pages that a collected step has filled."""
        num_full = num_computed // self.pool.page_size
        if num_full > state.num_remembered_pages:
            hashes = self._hashes(state, num_full)
            for idx in range(state.num_remembered_pages, num_full):
                self.pool.remember(state.page_ids[idx], hashes[idx])
            state.num_remembered_pages = num_full

    def _hashes(self, state: RequestState, num_pages: int) -> list[bytes]:
        """Hashes of the first pages, from collected tokens only. Tokens never change, so neither do hashes."""
        known, config = state.page_hashes, self._config
        if len(known) < num_pages:
            tokens = state.token_ids[: num_pages * self.pool.page_size]
            # Pages in which the drafter has left no keys are found by requests without drafts only.
            plain = config.drafts_in_pages and not state.request.num_drafts(config.num_drafts)
            first = b"plain" if plain else b""
            known.extend(page_hashes(tokens, self.pool.page_size, len(known), known[-1] if known else first))
        return known[:num_pages]

    # --- pages ------------------------------------------------------------------------------------

    def _reserve_pages_for_running(self) -> bool:
        """Give every running request the pages of its next token; False when that needs older steps collected first."""
        page_size = self.pool.page_size
        # Most have the pages of their next tokens already.
        for state in [s for s in self.running if self._num_slots(s) > len(s.page_ids) * page_size]:
            while state.row != NO_ROW and state.wants_step and not self._reserve_pages(state):
                if self._num_in_flight:
                    return False  # a step in flight may end a request; bounds only tighten
                self._preempt(self.running[-1])
        return True

    def _make_room_for_urgent(self) -> bool:
        """Let a waiting request of higher priority take the place of the lowest that runs; False to collect first."""
        while self.waiting and self.running:
            urgent, victim = self.waiting[0], self.running[-1]
            fits = self.pool.pages_for(self._num_slots(urgent, 1)) <= self.pool.num_free and bool(self._free_rows)
            if fits or urgent.request.priority >= victim.request.priority:
                return True
            if self._num_in_flight:
                return False
            self._preempt(victim)
        return True

    def _num_slots(self, state: RequestState, num_more: int = 0) -> int:
        """Slots of the cache that the request's next step may write, drafts and drafting after them included."""
        config, request = self._config, state.request
        bound = state.num_tokens_bound + num_more
        if config.num_drafts and request.num_drafts(config.num_drafts):
            bound += config.num_drafts + config.num_draft_slots
        return min(bound, request.max_total_tokens)

    def _reserve_pages(self, state: RequestState) -> bool:
        missing = self.pool.pages_for(self._num_slots(state)) - len(state.page_ids)
        if missing <= 0:
            return True
        if missing > self.pool.num_free:
            return False
        # Some more while the pool is well filled, so that the next steps need not change the page table.
        to_limit = self.pool.pages_for(state.request.max_total_tokens) - len(state.page_ids) - missing
        to_spare = self.pool.num_free - missing - self.pool.num_usable // 4
        missing += max(0, min(self._config.lookahead_pages, to_limit, to_spare))
        state.page_ids += self.pool.take(missing)
        return True

    def _preempt(self, state: RequestState) -> None:
        """Send a request back to its place in the queue. Its tokens stay; what the cache loses is computed again."""
        self.running.remove(state)
        self._free(state)
        state.num_computed = 0
        bisect.insort(self.waiting, state, key=_rank)
        self._totals.num_preemptions += 1

    # --- leaving ----------------------------------------------------------------------------------

    def _retire(self, state: RequestState) -> None:
        """No more steps for this request. A row that no later step selects is inert; it needs no message."""
        state.finished = True
        if state.row == NO_ROW:
            self.waiting.remove(state)
            del self._requests[state.request.request_id]
        elif state in self.running:
            self.running.remove(state)
            self._leaving.append(state)

    def _release_leaving(self, num_collected: int) -> None:
        """Return rows and pages of requests whose last step is among the first ``num_collected``."""
        for state in [s for s in self._leaving if s.last_step_id < num_collected]:
            self._leaving.remove(state)
            self._free(state)
            del self._requests[state.request.request_id]

    def _oldest_in_flight(self) -> int:
        return self._next_step_id - self._num_in_flight

    def _free(self, state: RequestState) -> None:
        self.pool.give_back(state.page_ids)
        self._free_rows.append(state.row)
        state.page_ids = []
        state.num_staged_pages = 0
        state.row = NO_ROW

    def check_idle(self) -> None:
        """With nothing to do, every row and page must be home."""
        if self._requests or self._num_in_flight:
            raise RuntimeError("check_idle with requests present")
        self.pool.check([])
        if self.pool.num_free != self.pool.num_usable or len(self._free_rows) != self._config.max_num_seqs:
            raise RuntimeError(
                f"leak: {self.pool.num_usable - self.pool.num_free} pages, "
                f"{self._config.max_num_seqs - len(self._free_rows)} rows"
            )


def _rank(state: RequestState) -> tuple[int, int]:
    return state.rank


def _end(scheduled: ScheduledRequest) -> int:
    return scheduled.num_computed_bound + scheduled.num_tokens
