"""The scheduler: by priority, then first come, first served; decodes before prompts; preemption when pages run out.

It may be asked for a new step while others are in flight. It then works on upper bounds, and what it gave to a request
(row and pages) comes back only after the last step that has the request is collected.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from slipstream.config import CacheConfig, SchedulerConfig
from slipstream.errors import RequestError
from slipstream.scheduler.common_pages import count_common_pages
from slipstream.scheduler.draft_ledger import DraftLedger
from slipstream.scheduler.draft_length import DraftLength
from slipstream.scheduler.open_plan import OpenPlan
from slipstream.scheduler.pages import PagePool, check_fits, page_hashes, root_hash
from slipstream.scheduler.request_state import NEVER, NO_ROW, RequestState
from slipstream.scheduler.steady_batch import SteadyBatch
from slipstream.scheduler.take_tokens import take_tokens
from slipstream.speculate.host_proposer import HostProposer
from slipstream.types import (
    Composition,
    Request,
    RowInit,
    RowStatus,
    StepPlan,
    StepResult,
    TokenUpdate,
    TokenUpdates,
)

_FILL_UP_AT_ONCE = 32  # no step should be much longer than the others
_MOST_CHECKED_PAGES = 4096  # when there is nothing to do


@dataclass(slots=True)
class SchedulerStats:
    num_waiting: int = 0
    num_running: int = 0
    num_free_pages: int = 0
    num_preemptions: int = 0
    num_drains: int = 0
    num_prompt_tokens: int = 0  # of all requests admitted so far, each counted once
    num_cached_tokens: int = 0  # of those, found in the prefix cache
    draft_length: int = 0  # that the next step may check


class _Launched(NamedTuple):
    """Who is in a step, until it is collected."""

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
        self._config = config
        self.drafts = DraftLedger(config, draft_length, host_proposer)
        self._cache = cache
        self.pool = PagePool(cache.num_pages, cache.page_size, config.prefix_caching)
        self.waiting: list[RequestState] = []  # by rank
        self.running: list[RequestState] = []  # by rank
        self._leaving: list[RequestState] = []  # finished, but a step in flight still has them
        self._requests: dict[str, RequestState] = {}
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._next_step_id = 0
        self._in_flight: dict[int, _Launched] = {}  # by step, oldest first
        self._next_arrival_idx = 0
        self._num_admitted = 0
        self._recent: dict[Composition, Composition] = {}  # one object for those that are the same
        self._steady: SteadyBatch | None = None  # if the newest step may repeat itself
        self._totals = SchedulerStats()

    # --- requests come and go ---------------------------------------------------------------------

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
        """End a request now, from outside: an abort, or a stop string in its text. False if it is not here."""
        state = self._requests.get(request_id)
        if state is None:
            return False
        self._retire(state)
        self._release_leaving(self._oldest_in_flight())
        return True

    @property
    def prefix_caching_is_refused(self) -> bool:
        return bool(self._config.prefix_caching_refused)

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

    # --- a step -----------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step, or None when there is nothing to launch before older steps are collected."""
        steady = self._steady
        if steady is None or steady.lengths != self.drafts.length.wanted() or not steady.can_repeat():
            return self._decide()
        return self._launch(steady.repeat(self._next_step_id), steady.states, decodes_only=True)

    def _decide(self) -> StepPlan | None:
        """The next step from the beginning: anybody may come, go or grow."""
        self._steady = None
        if self._must_know_lengths() or not self._reserve_pages_for_running() or not self._make_room_for_urgent():
            self._totals.num_drains += 1
            return None
        opened, budget = OpenPlan(), self._config.max_num_batched_tokens
        wanting = [s for s in self.running if len(s.token_ids) + s.num_draws_in_flight < s.max_total]
        prefills = [s for s in wanting if s.num_tokens_bound - s.num_computed > 1]
        # Decodes first: each needs a token and its drafts, and they are the ones somebody is watching.
        decodes = [s for s in wanting if s not in prefills] if prefills else wanting
        lengths = self.drafts.length.wanted()
        num_drafts = self.drafts.count_checked(lengths, decodes)
        budget -= opened.add_decodes(decodes, num_drafts)
        if decodes:
            budget = min(budget, self._config.mixed_prefill_tokens)
        for state in prefills:
            budget -= self._add_prefill(opened, state, budget)
        self._admit(opened, budget)
        if not opened.states:
            return None
        has_prompts, exact = len(opened.states) > len(decodes), self._config.exact_lengths
        next_drafts = self.drafts.plan_next(lengths, opened, decodes, has_prompts)
        is_exact = exact == "always" or (exact == "prefill" and has_prompts)
        assert not (is_exact and self._in_flight)
        plan = opened.close(self._next_step_id, self._recent, *next_drafts, is_exact, self._count_common)
        decodes_only = len(opened.states) == len(decodes)
        # A request that waits for a row waits until another leaves. One that waits for pages may find some any time.
        stays = num_drafts == min(lengths.check, next_drafts.num_made)  # what the next step checks
        may_repeat = stays and not (next_drafts.num_caught_up or is_exact or (self.waiting and self._free_rows))
        if decodes_only and not prefills and may_repeat:
            self._steady = SteadyBatch(plan, opened.states, num_drafts, lengths)
        return self._launch(plan, opened.states, decodes_only)

    def _count_common(self, states: Sequence[RequestState], num_tokens: int) -> int:
        return count_common_pages(states, num_tokens, self.pool.page_size, self._config.least_saved)

    def _must_know_lengths(self) -> bool:
        """Whether the next step's lengths must be true ones, and are bounds as long as steps are in flight."""
        exact = self._config.exact_lengths
        if exact == "never" or not self._in_flight:
            return False
        may_admit = bool(self.waiting and self._free_rows)
        return exact == "always" or may_admit or any(s.num_tokens_bound - s.num_computed > 1 for s in self.running)

    def _launch(self, plan: StepPlan, states: Sequence[RequestState], decodes_only: bool) -> StepPlan:
        self._next_step_id += 1
        self._in_flight[plan.step_id] = _Launched(states, decodes_only)
        self.drafts.launched(plan, states)
        return plan

    def use_wait(self) -> None:
        """What the next step need not wait for; called while the device is busy."""
        self.drafts.use_wait()

    def took(self, plan: StepPlan, seconds: float) -> None:
        """Of a step that was alone."""
        self.drafts.took(plan, seconds)

    def collect(self, result: StepResult) -> TokenUpdates:
        """Take a finished step's tokens in, and turn bounds into facts."""
        states, decodes_only = self._in_flight.pop(result.plan.step_id)
        self.drafts.note_gaps(result.plan, states)
        all_go_on = decodes_only and not any(result.statuses) and all(result.token_ids)
        if all_go_on and all(state.is_usual for state in states):
            updates = self._take_all(result, states)
        else:
            updates = self._take_each(result, states)
        if self._leaving:
            self._release_leaving(result.plan.step_id + 1)
        self.drafts.collected(result)
        return updates

    def _take_all(self, result: StepResult, states: Sequence[RequestState]) -> TokenUpdates:
        """Everybody decodes and goes on."""
        composition = result.plan.composition
        for state, new in zip(states, result.token_ids, strict=True):
            known = state.token_ids
            known += new
            state.num_draws_in_flight -= 1
            if len(known) > state.remember_beyond:
                self._remember_pages(state, len(known) - 1)
        if not self._config.num_drafts:
            return TokenUpdates(composition.request_ids, result.token_ids)
        if num_drafts := composition.num_drafts[0]:
            for state, new in zip(states, result.token_ids, strict=True):
                state.num_drafts_in_flight -= num_drafts
                state.num_computed -= num_drafts + 1 - len(new)
        return TokenUpdates(composition.request_ids, result.token_ids, result.num_drafts, result.num_accepted)

    def _take_each(self, result: StepResult, states: Sequence[RequestState]) -> TokenUpdates:
        """Request by request: each may be at another point of its life."""
        composition = result.plan.composition
        ids: list[str] = []
        tokens: list[list[int]] = []
        drafts: list[int] = []
        accepted: list[int] = []
        others: dict[int, TokenUpdate] = {}
        for i, (state, token_ids, samples) in enumerate(
            zip(states, result.token_ids, composition.samples, strict=True)
        ):
            # Outputs are routed by the plan that launched them, not by who owns the row now.
            if state.generation != composition.generations[i]:
                continue
            if samples:
                num_drafts = composition.num_drafts[i]
                state.num_draws_in_flight -= 1
                state.num_drafts_in_flight -= num_drafts
                # The mirror took every draft for accepted.
                state.num_computed -= num_drafts - max(0, len(token_ids) - 1)
            if state.finished:
                continue
            if state.is_usual and token_ids and not result.statuses[i] and i not in result.prompt_logprobs:
                state.token_ids += token_ids
            elif (update := take_tokens(state, result, i)) is not None:
                others[len(ids)], token_ids = update, update.token_ids
            if len(state.token_ids) > state.remember_beyond and result.statuses[i] is not RowStatus.ERROR:
                # The step's last token is drawn, not computed; a chunk of a prompt is computed to its end.
                self._remember_pages(state, len(state.token_ids) - 1 if samples else _end(result.plan, i))
            if token_ids or len(ids) in others:
                ids.append(state.request.request_id)
                tokens.append(token_ids)
                drafts.append(result.num_drafts[i])
                accepted.append(min(result.num_accepted[i], len(token_ids)))
        for update in others.values():
            self._go_on(update)
        return TokenUpdates(ids, tokens, drafts, accepted, others)

    def _go_on(self, update: TokenUpdate) -> None:
        state = self._requests[update.request_id]
        if update.finish_reason is not None:
            self._retire(state)
        elif update.token_ids:
            state.has_its_first()

    # --- one request's share ----------------------------------------------------------------------

    def _add_prefill(self, opened: OpenPlan, state: RequestState, budget: int) -> int:
        num_tokens = state.num_tokens_bound - state.num_computed  # whose keys and values no launched step computes
        return opened.add_prefill(state, min(num_tokens, budget, self._config.max_prefill_chunk))

    def _admit(self, opened: OpenPlan, budget: int) -> None:
        """Move waiting requests in while rows, budget, staging space and pages for all their tokens last."""
        num_staged = 0
        while self.waiting and self._free_rows and budget > 0:
            state = self.waiting[0]
            num_staged += len(state.token_ids)
            cached = self._find_cached(state)
            needed = self.pool.pages_for(_num_first_slots(state)) - len(cached)
            room = self.pool.num_free - self.pool.num_held_by_nobody(cached)
            if needed > room or num_staged > self._config.max_model_len:
                return
            self.waiting.pop(0)
            self._move_in(opened, state, cached, needed)
            budget -= self._add_prefill(opened, state, budget)

    def _move_in(self, opened: OpenPlan, state: RequestState, cached: list[int], num_new_pages: int) -> None:
        request = state.request
        self.pool.hold(cached)
        state.hold_pages(cached + self.pool.take(num_new_pages), self.pool.page_size)
        state.num_computed = len(cached) * self.pool.page_size
        self._expect_page(state, len(cached))
        if state.num_cached_tokens is None:
            state.num_cached_tokens = state.num_computed
            self._totals.num_prompt_tokens += len(request.prompt_token_ids)
            self._totals.num_cached_tokens += state.num_computed
        state.row = self._free_rows.pop()
        self._num_admitted += 1
        state.generation = self._num_admitted
        bisect.insort(self.running, state, key=_rank)
        draft_start = self.drafts.move_in(state, self.pool, cached)
        opened.row_inits.append(RowInit(state.row, request, tuple(state.token_ids), state.num_computed, draft_start))

    # --- the prefix cache -------------------------------------------------------------------------

    def _find_cached(self, state: RequestState) -> list[int]:
        """Pages that hold the beginning of its tokens. The last token is always computed: its logits are wanted."""
        if not self._config.prefix_caching or not state.request.may_use_cache:
            return []
        num_pages = (len(state.token_ids) - 1) // self.pool.page_size
        return self.pool.find(self._hashes(state, num_pages)[:num_pages])

    def _remember_pages(self, state: RequestState, num_computed: int) -> None:
        """Offer to the cache the pages that a collected step has filled."""
        num_full = num_computed // self.pool.page_size
        if num_full > state.num_remembered_pages:
            hashes = self._hashes(state, num_full)
            is_drafted = self.drafts.has_all_keys(state)
            for idx in range(state.num_remembered_pages, num_full):
                self.pool.remember(state.page_ids[idx], hashes[idx], is_drafted)
            self._expect_page(state, num_full)

    def _expect_page(self, state: RequestState, num_remembered: int) -> None:
        state.num_remembered_pages = num_remembered
        state.remember_beyond = (num_remembered + 1) * self.pool.page_size if self._config.prefix_caching else NEVER

    def _hashes(self, state: RequestState, num_pages: int) -> list[bytes]:
        """Hashes of the first pages at least, from collected tokens only. Tokens never change, so neither do hashes."""
        known, page_size = state.page_hashes, self.pool.page_size
        if len(known) < num_pages:
            # What a drafter that looks ahead keeps in a page's last slot belongs to the token after the page.
            num_behind = self.drafts.num_next_tokens
            tokens = state.token_ids[len(known) * page_size : num_pages * page_size + num_behind]
            known.extend(page_hashes(tokens, page_size, known[-1] if known else state.root_hash, num_behind))
        return known

    # --- pages ------------------------------------------------------------------------------------

    def _reserve_pages_for_running(self) -> bool:
        """Give every running request the pages of its next token; False when that needs older steps collected first."""
        # Most have the pages of their next tokens already, and some are launched as far as they may go.
        needy = [s for s in self.running if s.num_slots_left < 0 and s.wants_step]
        for state in needy:
            while state.row != NO_ROW and not self._reserve_pages(state):
                if self._in_flight:
                    return False  # a step in flight may end a request; bounds only tighten
                self._preempt(self.running[-1])
        if needy:
            self._fill_up()
        return True

    def _fill_up(self) -> None:
        """Pages for others who will want some soon: a step that changes one page table can as well change more."""
        soon = self.pool.page_size * (self._config.lookahead_pages // 2)
        for state in [s for s in self.running if 0 <= s.num_slots_left < soon][:_FILL_UP_AT_ONCE]:
            self._take_pages(state, self._num_to_spare(state, 0))

    def _make_room_for_urgent(self) -> bool:
        """Let a waiting request of higher priority take the place of the lowest that runs; False to collect first."""
        while self.waiting and self.running:
            urgent, victim = self.waiting[0], self.running[-1]
            fits = self.pool.pages_for(_num_first_slots(urgent)) <= self.pool.num_free and bool(self._free_rows)
            if fits or urgent.request.priority >= victim.request.priority:
                return True
            if self._in_flight:
                return False
            self._preempt(victim)
        return True

    def _reserve_pages(self, state: RequestState) -> bool:
        missing = self.pool.pages_for(state.num_slots) - len(state.page_ids)
        if missing <= 0:
            return True
        if missing > self.pool.num_free:
            return False
        self._take_pages(state, missing + self._num_to_spare(state, missing))
        return True

    def _take_pages(self, state: RequestState, count: int) -> None:
        state.hold_pages(state.page_ids + self.pool.take(count), self.pool.page_size)

    def _num_to_spare(self, state: RequestState, missing: int) -> int:
        """Some more while the pool is well filled, so that the next steps need not change the page table."""
        to_limit = self.pool.pages_for(state.request.max_total_tokens) - len(state.page_ids) - missing
        to_spare = self.pool.num_free - missing - self.pool.num_usable // 4
        return max(0, min(self._config.lookahead_pages, to_limit, to_spare))

    def _preempt(self, state: RequestState) -> None:
        """Send a request back to its place in the queue. Its tokens stay; what the cache loses is computed again."""
        self._steady = None
        self.running.remove(state)
        self._free(state)
        state.num_computed = 0
        bisect.insort(self.waiting, state, key=_rank)
        self._totals.num_preemptions += 1

    # --- leaving ----------------------------------------------------------------------------------

    def _retire(self, state: RequestState) -> None:
        """No more steps for this request. A row that no later step selects is inert; it needs no message."""
        state.finished, state.is_usual = True, False
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
        """Return rows and pages of requests whose last step is among the first ``num_collected``."""
        for state in [s for s in self._leaving if s.last_step_id < num_collected]:
            self._steady = None
            self._leaving.remove(state)
            self._free(state)
            del self._requests[state.request.request_id]

    def _oldest_in_flight(self) -> int:
        return next(iter(self._in_flight), self._next_step_id)

    def _free(self, state: RequestState) -> None:
        self.pool.give_back(state.page_ids)
        self._free_rows.append(state.row)
        state.hold_pages([], self.pool.page_size)
        state.num_staged_pages = 0
        state.row = NO_ROW

    def check_idle(self) -> None:
        """With nothing to do, every row and page must be home. A large pool is only counted: to look at each page of
        an H200 takes 20 ms, which the end of the last answer would wait for."""
        if self._requests or self._in_flight:
            raise RuntimeError("check_idle with requests present")
        if self.pool.num_pages <= _MOST_CHECKED_PAGES:
            self.pool.check([])
        if self.pool.num_free != self.pool.num_usable or len(self._free_rows) != self._config.max_num_seqs:
            raise RuntimeError(
                f"leak: {self.pool.num_usable - self.pool.num_free} pages, "
                f"{self._config.max_num_seqs - len(self._free_rows)} rows"
            )


def _rank(state: RequestState) -> tuple[int, int]:
    return state.rank


def _num_first_slots(state: RequestState) -> int:
    """For all tokens of a request that moves in, and one more: what it draws in its first step."""
    return min(state.num_slots + 1, state.request.max_total_tokens)


def _end(plan: StepPlan, i: int) -> int:
    return int(plan.num_computed_bounds[i]) + plan.composition.num_tokens[i]
