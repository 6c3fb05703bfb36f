"""A step while it is being decided: the columns of its plan, and the optimistic mirror of its requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from slipstream.plan import Composition, EncoderRun, PageDiff, RowInit, StepPlan
from slipstream.scheduler.request_state import RequestState

_NUM_RECENT = 8  # recent compositions are kept, since draft lengths alternate


@dataclass(slots=True)
class OpenPlan:
    states: list[RequestState] = field(default_factory=list)
    row_inits: list[RowInit] = field(default_factory=list)
    page_diffs: list[PageDiff] = field(default_factory=list)
    encoder_runs: list[EncoderRun] = field(default_factory=list)
    _request_ids: list[str] = field(default_factory=list)
    _generations: list[int] = field(default_factory=list)
    _rows: list[int] = field(default_factory=list)
    _num_tokens: list[int] = field(default_factory=list)
    _bounds: list[int] = field(default_factory=list)
    _samples: list[bool] = field(default_factory=list)
    _num_drafts: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(self._num_tokens)

    def add_decodes(self, states: Sequence[RequestState], num_drafts: int) -> int:
        """The last token of each and draft slots after it; returns the number of tokens."""
        num_tokens, count = 1 + num_drafts, len(states)
        self._num_tokens += [num_tokens] * count
        self._samples += [True] * count
        self._num_drafts += [num_drafts] * count
        self._add(states)
        for state in states:
            state.num_computed += num_tokens
            state.num_draws_in_flight += 1
            state.num_drafts_in_flight += num_drafts
        return num_tokens * count

    def add_prefill(self, state: RequestState, num_tokens: int) -> int:
        """Some of its tokens whose keys and values no launched step computes; if there are none it is left out."""
        if num_tokens <= 0:
            return 0
        samples = state.num_computed + num_tokens == state.num_tokens_bound
        self._num_tokens.append(num_tokens)
        self._samples.append(samples)
        self._num_drafts.append(0)
        self._add([state])
        state.num_computed += num_tokens
        state.num_draws_in_flight += samples
        return num_tokens

    def _add(self, states: Sequence[RequestState]) -> None:
        """The common part, before the mirror is updated."""
        self.states += states
        self._request_ids += [state.request.request_id for state in states]
        self._generations += [state.generation for state in states]
        self._rows += [state.row for state in states]
        self._bounds += [state.num_computed for state in states]
        for state in states:
            if len(state.page_ids) > state.num_staged_pages:
                new_pages = state.page_ids[state.num_staged_pages :]
                self.page_diffs.append(PageDiff(state.row, state.num_staged_pages, new_pages))
                state.num_staged_pages = len(state.page_ids)

    def close(
        self,
        step_id: int,
        recent: dict[Composition, Composition],
        num_next_drafts: int,
        num_caught_up: int,
        lengths_are_exact: bool,
        count_common: Callable[[Sequence[RequestState], int], int],
    ) -> StepPlan:
        """The plan. If it has the composition of one of the steps before, it shares the object."""
        composition = Composition(
            request_ids=tuple(self._request_ids),
            generations=tuple(self._generations),
            rows=tuple(self._rows),
            num_tokens=tuple(self._num_tokens),
            samples=tuple(self._samples),
            num_drafts=tuple(self._num_drafts),
            total_tokens=self.num_tokens,
            num_next_drafts=num_next_drafts,
            num_caught_up=num_caught_up,
            lengths_are_exact=lengths_are_exact,
        )
        if (known := recent.get(composition)) is None:
            if num_common := count_common(self.states, self.num_tokens):
                composition = replace(composition, num_common_pages=num_common)
            if len(recent) >= _NUM_RECENT:
                del recent[next(iter(recent))]
            known = recent[composition] = composition
        bounds = np.array(self._bounds, dtype=np.int32)
        return StepPlan(step_id, known, bounds, self.row_inits, self.page_diffs, encoder_runs=self.encoder_runs)
