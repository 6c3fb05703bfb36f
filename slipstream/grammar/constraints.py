"""The constrained requests of an engine: where each is in its grammar, and the masks of every step.

A step needs the masks of the token after each request's tokens, and after each of its drafts. Both are known when the
step before is collected. From then on a thread moves the matchers and fills masks, while the step's forward pass runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from slipstream.errors import RequestError
from slipstream.grammar.interface import GrammarBackend, Matcher, Task, Threads
from slipstream.grammar.mask_pool import MaskPool
from slipstream.grammar.walk import GrammarWalk, Visit
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
        self._pool = MaskPool(limits.num_masks)
        self._num_words = -(-limits.vocab_size // 32)
        self._walk = GrammarWalk(backend, self._num_words, tuple(eos_token_ids))
        self._states: dict[str, _Constrained] = {}
        # Matchers at the beginning of their grammars, least recently used first.
        self._kept: dict[StructuredOutput, Task] = {}
        self._compiling: deque[tuple[Request, Task]] = deque()  # by arrival
        self._filling: Task | None = None

    # --- requests ---------------------------------------------------------------------------------

    def prepare(self) -> None:
        """What would hold up other requests when the first constrained one arrives."""
        self._backend.prepare()

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
        most_next, visits, start = composition.num_next_drafts, [], 0
        for i, request_id in enumerate(composition.request_ids):
            state, num_drafts = self._states.get(request_id), composition.num_drafts[i]
            if state is not None and composition.samples[i]:
                if (draft := staged.get(composition.rows[i])) is not None:
                    self._place_staged(state, draft)
                visits.append(self._visit(state, i, start, (num_drafts, most_next)))
            start += 1 + num_drafts
        num_logits = start
        self._filling = self._threads.fill(lambda: self._fill(visits, num_logits))

    def _visit(self, state: _Constrained, place: int, first_logit: int, num_drafts: tuple[int, int]) -> Visit:
        """``num_drafts``: maximum drafts of the step, and of the next one."""
        request, output, (num_own, num_next) = state.request, state.output, num_drafts
        new, state.num_taken = output[state.num_taken :], len(output)
        drafts, num_next = tuple(state.drafts[:num_own]), min(num_next, request.num_drafts(self._limits.num_drafts))
        return Visit(request, state.matcher, place, first_logit, len(output), new, drafts, num_next)

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

    def _fill(self, visits: Sequence[Visit], num_logits: int) -> FilledMasks:
        walked = self._walk.go(visits)
        placed = self._pool.place(walked.masks)
        rows = np.full(num_logits, FREE, dtype=np.int32)
        rows[walked.logits] = placed.rows
        masks = StepMasks(rows, placed.destinations, walked.masks[placed.new], walked.runs)
        return FilledMasks(masks, walked.errors)
