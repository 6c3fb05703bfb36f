"""The scheduler's accounts of drafts: how many a step verifies and proposes, and which tokens the drafter has missed.

It knows the drafter by its ``Needs``, and the draft length by its policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from slipstream.config import SchedulerConfig
from slipstream.host_drafting import HostProposer
from slipstream.plan import HostDraft, StepPlan, StepResult
from slipstream.scheduler.draft_length import DraftLength, FixedLength, Lengths
from slipstream.scheduler.open_plan import OpenPlan
from slipstream.scheduler.pages import PagePool
from slipstream.scheduler.request_state import RequestState

_CATCH_UP_AT_ONCE = 64  # limits the length of a single step


class NextDrafts(NamedTuple):
    """The drafter's work after a step."""

    num_proposed: int  # maximum drafts of each request
    num_caught_up: int  # maximum tokens of each that it missed and processes as well


class DraftLedger:
    def __init__(
        self, config: SchedulerConfig, length: DraftLength | None = None, host: HostProposer | None = None
    ) -> None:
        self._config = config
        self._has_drafts = config.num_drafts > 0
        # Its own keys have gaps where a step proposes nothing, unless it processes such steps as well.
        self._leaves_gaps = config.needs.own_keys and not config.needs.follows
        self.length = FixedLength(config.num_drafts) if length is None else length
        self.num_proposed = 0  # drafts that the newest step proposes, or that the host will
        self._host = host

    # --- requests ---------------------------------------------------------------------------------

    def enter(self, state: RequestState) -> None:
        """A request has arrived."""
        if state.request.num_drafts(self._config.num_drafts):
            state.drafts = True
            state.num_ahead = self._config.num_drafts + self._config.num_draft_slots

    def move_in(self, state: RequestState, pool: PagePool, cached: Sequence[int]) -> int:
        """It has a row and begins with cached pages; returns the slot from which on they hold the drafter's keys."""
        state.has_draft_gap = not state.drafts or not pool.are_drafted(cached)
        self.length.move_in(state.row, state.token_ids, state.request.num_drafts(self._config.num_drafts))
        return state.num_computed if state.has_draft_gap else 0

    def has_all_keys(self, state: RequestState) -> bool:
        """Whether its pages hold all the drafter's keys."""
        return not (state.has_draft_gap and self._config.needs.own_keys)

    @property
    def num_next_tokens(self) -> int:
        """How many tokens after a page the drafter's keys in it depend on."""
        return int(self._config.needs.looks_ahead)

    # --- a step -----------------------------------------------------------------------------------

    @property
    def num_checked(self) -> int:
        """Drafts that the next step may verify."""
        return min(self.length.next_lengths().check, self.num_proposed)

    def count_checked(self, lengths: Lengths, decodes: Sequence[RequestState]) -> int:
        """Equally many for all requests, so that one graph serves the batch; a request with fewer has unused slots.

        Drafts beyond this number are not verified.
        """
        return min(lengths.check, self.num_proposed) if any(s.drafts for s in decodes) else 0

    def plan_next(
        self, lengths: Lengths, opened: OpenPlan, decodes: Sequence[RequestState], has_prompts: bool
    ) -> NextDrafts:
        """The drafter's work after the step that is open."""
        if not any(s.drafts for s in opened.states):
            return NextDrafts(0, 0)
        num_proposed = self._count_proposed(lengths.make, has_prompts)
        return NextDrafts(
            num_proposed, self._count_caught_up(opened, decodes) if num_proposed and not self.num_proposed else 0
        )

    def _count_proposed(self, num_drafts: int, has_prompts: bool) -> int:
        # A prompt that the drafter misses would leave a gap in its keys that is never closed.
        if has_prompts and self._leaves_gaps:
            num_drafts = max(num_drafts, 1)
        if has_prompts and num_drafts and self._config.drafts_beside_prompts is not None:
            return self._config.drafts_beside_prompts
        return num_drafts

    def _count_caught_up(self, opened: OpenPlan, decodes: Sequence[RequestState]) -> int:
        """After steps without drafts: the maximum number of tokens that a drafter which catches up has missed.

        Bounds may have been too high at either end; a few tokens more do no harm.
        """
        config = self._config
        if not config.needs.catches_up or not decodes:
            return 0
        most = max(state.num_computed - state.drafted_until for state in decodes) + config.num_drafts
        room = (config.max_num_batched_tokens - opened.num_tokens) // len(opened.states) - 1
        return max(0, min(most, _CATCH_UP_AT_ONCE, room))

    def launched(self, plan: StepPlan, states: Sequence[RequestState]) -> None:
        num_proposed = plan.composition.num_next_drafts
        if self.num_proposed and not num_proposed:
            for state, bound in zip(states, plan.num_computed_bounds.tolist(), strict=True):
                state.drafted_until = bound
        self.num_proposed = num_proposed
        self.length.launched(plan.composition)
        if self._host is not None:
            plan.host_drafts = self._propose_on_host(self._host, plan, states)

    @staticmethod
    def _propose_on_host(host: HostProposer, plan: StepPlan, states: Sequence[RequestState]) -> list[HostDraft]:
        """From the collected tokens on, past those of the steps in flight, as far as this step verifies."""
        drafts = []
        for state, num_drafts in zip(states, plan.composition.num_drafts, strict=True):
            if state.drafts and num_drafts:
                count = state.num_draws_in_flight - 1 + state.num_drafts_in_flight
                if token_ids := host.propose(state.request.request_id, state.token_ids, count)[:count]:
                    drafts.append(HostDraft(state.row, len(state.token_ids), token_ids))
        return drafts

    def note_gaps(self, plan: StepPlan, states: Sequence[RequestState]) -> None:
        """Before the tokens of a collected step are taken in."""
        if self._leaves_gaps and not plan.composition.num_next_drafts:
            for state in states:
                state.has_draft_gap = True

    def collected(self, result: StepResult) -> None:
        if self._has_drafts:
            self.length.collected(result.plan.composition, result.num_accepted, result.would_accept)

    def update_length(self) -> None:
        """While the device is busy."""
        self.length.update()

    def record_seconds(self, plan: StepPlan, seconds: float) -> None:
        """Of a step that was alone."""
        if self._has_drafts:
            self.length.record_seconds(plan.composition, seconds)
