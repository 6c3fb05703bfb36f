"""The constrained requests of an engine: where each is in its grammar, and the masks of every step.

A step needs the masks of the token after each request's tokens, and after each of its drafts. Both are known when the
step before is collected. From then on a thread moves the matchers and fills masks, while the step's forward pass runs.
A matcher takes in tokens that are final. Drafts it only visits: it goes back before the next step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from slipstream.errors import RequestError
from slipstream.grammar.interface import GrammarBackend, Matcher, Task, Threads, Words
from slipstream.grammar.mask_pool import MaskPool
from slipstream.plan import HostDraft, StepMasks, StepPlan, StepResult
from slipstream.request import Request
from slipstream.structured import StructuredOutput

_MAX_KEPT = 256  # compiled grammars
FREE = -1  # the row of a position at which every token is allowed


class MaskLimits(NamedTuple):
    vocab_size: int
    max_num_logits: int  # of one step
    num_masks: int  # rows of the pool
    num_drafts: int  # the engine's largest


@dataclass(slots=True, eq=False)
class _Constrained:
    """A request that a matcher follows."""

    request: Request
    matcher: Matcher
    output: list[int] = field(default_factory=list)  # collected tokens
    num_taken: int = 0  # of those, given to the matcher
    drafts: Sequence[int] = ()  # for the next step


class _Visit(NamedTuple):
    """A request's share of the work for a step."""

    state: _Constrained
    first_logit: int
    num_output: int  # tokens of the output before the first logit
    new: list[int]  # of those, for the matcher to take in
    drafts: Sequence[int]


class FilledMasks(NamedTuple):
    masks: StepMasks
    errors: dict[str, str]  # by request: why its grammar cannot go on


class Compiled(NamedTuple):
    request: Request
    error: str  # empty: it may be scheduled


class Constraints:
    def __init__(
        self, backend: GrammarBackend, threads: Threads, limits: MaskLimits, eos_token_ids: Sequence[int]
    ) -> None:
        self._backend, self._threads, self._limits = backend, threads, limits
        self._eos_token_ids = tuple(eos_token_ids)
        self._pool = MaskPool(limits.num_masks)
        self._num_words = -(-limits.vocab_size // 32)
        self._states: dict[str, _Constrained] = {}
        # Matchers at the beginning of their grammars, least recently used first.
        self._kept: dict[StructuredOutput, Task] = {}
        self._compiling: deque[tuple[Request, Task]] = deque()  # by arrival
        self._filling: Task | None = None

    # --- requests ---------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Begin to compile its grammar. ``take_compiled`` returns it when that is done."""
        structure = request.params.structured
        assert structure is not None
        task = self._kept.pop(structure, None) or self._threads.compile(lambda: self._compile(structure))
        self._kept[structure] = task
        if len(self._kept) > _MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        # Threads take their work in order, so the grammar is compiled, or being compiled, when this begins.
        self._compiling.append((request, self._threads.compile(lambda: task.result().copy())))

    def _compile(self, structure: StructuredOutput) -> Matcher:
        matcher = self._backend.compile(structure)
        # A matcher's first mask takes the longest, so it is computed here.
        self._backend.fill([(matcher, 0)], np.zeros((1, self._num_words), dtype=np.int32))
        return matcher

    @property
    def is_compiling(self) -> bool:
        return bool(self._compiling)

    def take_compiled(self, timeout_s: float) -> list[Compiled]:
        """Requests whose grammars are compiled, by arrival; waits so long for the first."""
        found: list[Compiled] = []
        while self._compiling and self._threads.wait(self._compiling[0][1], 0.0 if found else timeout_s):
            request, task = self._compiling.popleft()
            structure = request.params.structured
            assert structure is not None
            try:
                matcher: Matcher = task.result()
            except RequestError as error:
                self._kept.pop(structure, None)
                found.append(Compiled(request, str(error)))
                continue
            self._states[request.request_id] = _Constrained(request, matcher)
            found.append(Compiled(request, ""))
        return found

    def finish(self, request_id: str) -> bool:
        """A request has ended. True if its grammar was still being compiled: nothing else knows of it then."""
        self._states.pop(request_id, None)
        waiting = [pair for pair in self._compiling if pair[0].request_id != request_id]
        was_compiling = len(waiting) < len(self._compiling)
        self._compiling = deque(waiting)
        return was_compiling

    # --- steps ------------------------------------------------------------------------------------

    def note_result(self, result: StepResult) -> None:
        """The tokens and drafts of a collected step."""
        if not self._states:
            return
        for i, request_id in enumerate(result.plan.composition.request_ids):
            if (state := self._states.get(request_id)) is not None:
                state.output += result.token_ids[i]
                state.drafts = () if result.next_drafts is None else result.next_drafts[i]

    def concern(self, plan: StepPlan) -> bool:
        """Whether a request of the step is constrained."""
        return bool(self._states) and any(request_id in self._states for request_id in plan.composition.request_ids)

    def begin(self, plan: StepPlan) -> None:
        """Have the masks of this step filled. All steps before it are collected."""
        composition = plan.composition
        staged = {draft.row: draft for draft in plan.host_drafts}
        visits, start = [], 0
        for i, request_id in enumerate(composition.request_ids):
            state, num_drafts = self._states.get(request_id), composition.num_drafts[i]
            if state is not None and composition.samples[i]:
                if (draft := staged.get(composition.rows[i])) is not None:
                    self._place_staged(state, draft)
                new = state.output[state.num_taken :]
                state.num_taken = len(state.output)
                visits.append(_Visit(state, start, len(state.output), new, tuple(state.drafts[:num_drafts])))
            start += 1 + num_drafts
        num_logits = start
        self._filling = self._threads.fill(lambda: self._fill(visits, num_logits))

    def take_masks(self, timeout_s: float) -> FilledMasks | None:
        """The masks of the step that was begun; None if they are not there after this time."""
        assert self._filling is not None
        if not self._threads.wait(self._filling, timeout_s):
            return None
        filled: FilledMasks = self._filling.result()
        self._filling = None
        return filled

    def _place_staged(self, state: _Constrained, draft: HostDraft) -> None:
        """What the device makes of drafts from the host: see ``place_host_drafts``."""
        request, length = state.request, len(state.request.prompt_token_ids) + len(state.output)
        num_known = length - draft.first_idx
        known = [*request.prompt_token_ids, *state.output][draft.first_idx :]
        if not 0 <= num_known < len(draft.token_ids) or list(draft.token_ids[:num_known]) != known:
            return
        most = min(request.num_drafts(self._limits.num_drafts), request.max_total_tokens - length - 1)
        state.drafts = draft.token_ids[num_known : num_known + max(0, most)]

    # --- in a thread ------------------------------------------------------------------------------

    def _fill(self, visits: Sequence[_Visit], num_logits: int) -> FilledMasks:
        rows = np.full(num_logits, FREE, dtype=np.int32)
        masks = np.zeros((sum(1 + len(visit.drafts) for visit in visits), self._num_words), dtype=np.int32)
        logits: list[int] = []  # of each mask
        errors: dict[str, str] = {}
        for visit in visits:
            if visit.state.matcher.consume(visit.new) < _num_before_end(visit):
                reason = visit.state.matcher.error or "a token that it forbids was drawn"
                errors[visit.state.request.request_id] = f"the grammar of this request cannot go on: {reason}"
        walking, depth = [v for v in visits if v.state.request.request_id not in errors], 0
        visited = dict.fromkeys(map(id, walking), 0)
        while walking:
            places = [(visit.state.matcher, len(logits) + i) for i, visit in enumerate(walking)]
            self._backend.fill(places, masks)
            for visit, (_, idx) in zip(walking, places, strict=True):
                self._hold_back_ends(visit, depth, masks[idx])
                logits.append(visit.first_logit + depth)
            going_on = []
            for visit in walking:
                # What follows a draft that is not legal, or that ends the text, is never drawn.
                if depth < len(visit.drafts) and visit.drafts[depth] not in visit.state.request.stop_token_ids:
                    taken = visit.state.matcher.consume(visit.drafts[depth : depth + 1])
                    visited[id(visit)] += taken
                    going_on += [visit] * taken
            walking, depth = going_on, depth + 1
        for visit in visits:
            matcher = visit.state.matcher
            if reason := matcher.error:
                errors.setdefault(visit.state.request.request_id, f"the grammar of this request cannot go on: {reason}")
            matcher.rollback(visited.get(id(visit), 0))
        placed = self._pool.place(masks[: len(logits)])
        rows[logits] = placed.rows
        return FilledMasks(StepMasks(rows, placed.destinations, masks[placed.new]), errors)

    def _hold_back_ends(self, visit: _Visit, depth: int, mask: Words) -> None:
        """Tokens that end the text are drawn only where they may be, unless nothing else is legal."""
        request = visit.state.request
        params = request.params
        if visit.num_output + depth < params.min_tokens:
            held: Sequence[int] = request.stop_token_ids
        elif params.ignore_eos:
            held = self._eos_token_ids
        else:
            return
        kept = mask.view(np.uint32).copy()
        for token_id in held:
            kept[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)
        if kept.any():
            mask[:] = kept.view(np.int32)


def _num_before_end(visit: _Visit) -> int:
    """New tokens that the matcher must take in: the one that ends the text may be none of the grammar's."""
    stop_ids = visit.state.request.stop_token_ids
    return next((i for i, token_id in enumerate(visit.new) if token_id in stop_ids), len(visit.new))
