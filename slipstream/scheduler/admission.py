"""Which prompts a step continues, and which waiting requests get a row: by rank, but short prompts pass long ones."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from slipstream.config import SchedulerConfig
from slipstream.plan import EncoderRun, RowInit
from slipstream.scheduler.draft_ledger import DraftLedger
from slipstream.scheduler.open_plan import OpenPlan
from slipstream.scheduler.prompt_budget import StepRoom
from slipstream.scheduler.request_pages import CachedPages, RequestPages
from slipstream.scheduler.request_state import RequestState
from slipstream.scheduler.stats import SchedulerStats

_MOST_PASSED = 16  # waiting requests that are looked at for short prompts, since each look is one into the cache


class Queues(NamedTuple):
    """The scheduler's own lists."""

    waiting: list[RequestState]  # sorted by rank
    running: list[RequestState]  # by rank
    free_rows: list[int]


@dataclass(slots=True)
class _Arrivals:
    """What the requests take that one step admits."""

    num_staged: int = 0  # tokens
    num_encoded: int = 0  # entries of encoders' outputs


class Admission:
    def __init__(
        self, config: SchedulerConfig, pages: RequestPages, drafts: DraftLedger, queues: Queues, totals: SchedulerStats
    ) -> None:
        self._config, self._pages, self._drafts = config, pages, drafts
        self._queues, self._totals = queues, totals
        self._num_admitted = 0

    def add_prompts(self, opened: OpenPlan, prefills: Sequence[RequestState], room: StepRoom) -> None:
        """Chunks of prompts in work and of waiting ones, oldest first.

        Of one half of the room, prompts that end in this step are served first, the shortest before the others: so a
        long prompt does not keep short ones waiting, and always has at least the other half.
        """
        added, arrivals = set[int](), _Arrivals()
        if self._config.limits_time:
            short, first = (
                room.for_short(),
                min((s.request.priority for s in (*prefills, *self._queues.waiting)), default=0),
            )
            for state in sorted(prefills, key=lambda own: own.num_left):
                if state.request.priority == first and self._ends(state.num_left, state.num_computed, short):
                    added.add(id(state))
                    self._add_prefill(opened, state, room, short)
            self._admit_short(opened, room, short, arrivals)
        for state in prefills:
            if id(state) not in added:
                self._add_prefill(opened, state, room)
        self._admit(opened, room, arrivals)

    def _ends(self, num_tokens: int, num_computed: int, room: StepRoom) -> bool:
        """Whether all that is left of a prompt fits."""
        return num_tokens <= self._config.max_prefill_chunk and room.fits(num_tokens, num_computed) == num_tokens

    def _add_prefill(self, opened: OpenPlan, state: RequestState, *rooms: StepRoom) -> None:
        """As much of its prompt as all of the rooms have place for."""
        num_tokens, num_computed = state.num_left, state.num_computed  # tokens that no launched step computes
        fitting = min(room.fits(num_tokens, num_computed) for room in rooms)
        if self._config.whole_prompts and num_tokens > fitting:
            return
        taken = opened.add_prefill(state, min(fitting, self._config.max_prefill_chunk))
        for room in rooms:
            room.take(taken, num_computed)

    def _admit(self, opened: OpenPlan, room: StepRoom, arrivals: _Arrivals) -> None:
        """Admit waiting requests, by rank, while rows, room, staging space and pages for all their tokens last."""
        while self._queues.waiting and self._queues.free_rows and room.fits(1, 0):
            state = self._queues.waiting[0]
            if self._config.whole_prompts and len(state.token_ids) > room.tokens:
                return
            cached = self._pages.find_cached(state)
            has_room = room.fits(1, len(cached.prefix) * self._pages.pool.page_size)
            if not has_room or not self._may_enter(opened, state, cached, arrivals):
                return
            self._enter(opened, state, cached, arrivals)
            self._add_prefill(opened, state, room)

    def _admit_short(self, opened: OpenPlan, room: StepRoom, short: StepRoom, arrivals: _Arrivals) -> None:
        """Admit waiting requests of the first one's priority whose prompts end in this step, past longer ones.

        Of those that are passed, the first keeps a row and its pages: it waits for room in a step and for nothing else.
        """
        passed: RequestState | None = None
        for state in self._queues.waiting[:_MOST_PASSED]:
            if state.request.priority != self._queues.waiting[0].request.priority or len(
                self._queues.free_rows
            ) <= bool(passed):
                return
            cached = self._pages.find_cached(state)
            num_computed = len(cached.prefix) * self._pages.pool.page_size
            num_left = len(state.token_ids) - num_computed
            kept = self._pages.num_first(passed) if passed else 0
            if not self._ends(num_left, num_computed, short):
                passed = passed or state
                continue
            if not self._may_enter(opened, state, cached, arrivals, kept):
                return
            self._enter(opened, state, cached, arrivals)
            self._add_prefill(opened, state, room, short)

    def _may_enter(
        self, opened: OpenPlan, state: RequestState, cached: CachedPages, arrivals: _Arrivals, num_kept: int = 0
    ) -> bool:
        """Whether it can be staged and encoded in this step, and has pages, so many of which are another's."""
        needed = self._pages.num_first(state) - len(cached.all)
        available = self._pages.pool.num_free - self._pages.pool.num_unheld(cached.all) - num_kept
        if needed > available or arrivals.num_staged + len(state.token_ids) > self._config.max_staged_tokens:
            return False
        most_encoded = self._config.max_num_batched_tokens
        if opened.states:
            most_encoded = min(most_encoded, self._config.mixed_prefill_tokens)
        # An entry of an encoder's output counts as a token, but one request at least is encoded in a step.
        num_entries = 0 if cached.encoded else state.request.num_encoder_entries
        return not (arrivals.num_encoded and arrivals.num_encoded + num_entries > most_encoded)

    def _enter(self, opened: OpenPlan, state: RequestState, cached: CachedPages, arrivals: _Arrivals) -> None:
        arrivals.num_staged += len(state.token_ids)
        arrivals.num_encoded += 0 if cached.encoded else state.request.num_encoder_entries
        self._queues.waiting.remove(state)
        self._pages.move_in(state, cached)
        self._move_in(opened, state, cached)

    def _move_in(self, opened: OpenPlan, state: RequestState, cached: CachedPages) -> None:
        request = state.request
        if state.num_cached_tokens is None:
            state.num_cached_tokens = state.num_computed
            self._totals.num_prompt_tokens += len(request.prompt_token_ids)
            self._totals.num_cached_tokens += state.num_computed
        state.row = self._queues.free_rows.pop()
        self._num_admitted += 1
        state.generation = self._num_admitted
        bisect.insort(self._queues.running, state, key=lambda own: own.rank)
        draft_start, encoded = (
            self._drafts.move_in(state, self._pages.pool, cached.prefix),
            tuple(state.encoder_page_ids),
        )
        token_ids = tuple(state.token_ids)
        opened.row_inits.append(RowInit(state.row, request, token_ids, state.num_computed, draft_start, encoded))
        if state.is_encoding:
            assert request.encoder is not None
            opened.encoder_runs.append(EncoderRun(state.row, request.encoder, request.num_encoder_entries))
