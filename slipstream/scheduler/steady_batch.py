"""A batch of decodes only: until one ends or needs a page, each step repeats the one before with advanced bounds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slipstream.plan import StepPlan
from slipstream.scheduler.draft_length import Lengths
from slipstream.scheduler.request_state import NEVER, RequestState


class SteadyBatch:
    """The requests of a plan in which every one decodes, and the number of steps for which nothing has to be decided.

    It only skips work whose outcome is known. The scheduler drops it when a request arrives, ends or moves.
    """

    def __init__(self, plan: StepPlan, states: Sequence[RequestState], num_drafts: int, lengths: Lengths) -> None:
        self._plan = plan
        self.states = states
        self.lengths = lengths  # draft lengths of the plan
        self._num_drafts = num_drafts
        self._num_repeats = 0
        # Whether no rejected draft will lower a bound. Drafts of earlier steps may still be in flight.
        self._is_even = not num_drafts and not any(state.num_drafts_in_flight for state in states)

    def can_repeat(self) -> bool:
        if not self._num_repeats:
            self._num_repeats = self._count_repeats()
        return self._num_repeats > 0

    def _count_repeats(self) -> int:
        """How many more times the step can be repeated at least.

        Every step advances a request by its own token and at most all drafts. Without drafts this is exact; with drafts
        it is computed again when it is used up.
        """
        fewest = NEVER
        for state in self.states:
            bound = state.num_tokens_bound
            # Another step is useful while the launched ones cannot have reached the limit.
            num_left = min(state.max_total - 1, state.capacity - state.num_ahead) - bound
            if num_left < fewest:
                fewest = num_left
        return max(0, fewest // (1 + self._num_drafts) + 1)

    def repeat(self, step_id: int) -> StepPlan:
        """The next step, with the same composition."""
        self._num_repeats -= 1
        num_drafts, last = self._num_drafts, self._plan
        if self._is_even:
            bounds = last.num_computed_bounds + np.int32(1)
            for state in self.states:
                state.num_computed += 1
                state.num_draws_in_flight += 1
        else:
            bounds = np.array([state.num_computed for state in self.states], dtype=np.int32)
            for state in self.states:
                state.num_computed += 1 + num_drafts
                state.num_draws_in_flight += 1
                state.num_drafts_in_flight += num_drafts
        self._plan = StepPlan(step_id, last.composition, bounds)
        return self._plan
