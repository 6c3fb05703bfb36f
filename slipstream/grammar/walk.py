"""How a step may go on for each constrained request: the masks on the way, and the tokens that certainly follow.

A matcher takes in tokens that are final. Drafts it only visits, and so it does tokens that are certain because nothing
else is legal: it goes back before the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from slipstream.grammar.interface import GrammarBackend, Matcher, Words
from slipstream.plan import CertainRun
from slipstream.request import Request


class Visit(NamedTuple):
    """A request's share of the work for a step."""

    request: Request
    matcher: Matcher
    place: int  # of the request in the step
    first_logit: int
    num_output: int  # tokens of the output before the first logit
    new: Sequence[int]  # of those, for the matcher to take in
    drafts: Sequence[int]
    num_next: int  # maximum drafts that the step proposes for it


class Walked(NamedTuple):
    masks: Words  # [n, words]
    logits: list[int]  # of each mask
    runs: list[CertainRun]
    errors: dict[str, str]  # by request: why its grammar cannot go on


@dataclass(slots=True, eq=False)
class _Walker:
    """A visit on its way."""

    visit: Visit
    num_passed: int = 0  # tokens that the matcher has visited, to go back by
    num_accepted: int = 0  # of those, drafts
    mask: Words = field(default_factory=lambda: np.zeros(0, dtype=np.int32))  # of the next token
    run: list[int] = field(default_factory=list)

    def go_on(self, token_id: int) -> bool:
        """Past a token, unless it is not legal or ends the text: what follows it then is never drawn."""
        if token_id in self.visit.request.stop_token_ids:
            return False
        taken = self.visit.matcher.consume((token_id,))
        self.num_passed += taken
        return bool(taken)


class GrammarWalk:
    def __init__(self, backend: GrammarBackend, num_words: int, eos_token_ids: Sequence[int]) -> None:
        self._backend, self._num_words, self._eos_token_ids = backend, num_words, eos_token_ids

    def go(self, visits: Sequence[Visit]) -> Walked:
        errors: dict[str, str] = {}
        for visit in visits:
            if visit.matcher.consume(visit.new) < _num_before_end(visit):
                reason = visit.matcher.error or "a token that it forbids was drawn"
                errors[visit.request.request_id] = _cannot_go_on(reason)
        walkers = [_Walker(visit) for visit in visits if visit.request.request_id not in errors]
        masks = np.zeros((sum(1 + len(visit.drafts) for visit in visits), self._num_words), dtype=np.int32)
        logits = self._visit_drafts(walkers, masks)
        runs = self.follow_certain(walkers)
        for walker in walkers:
            matcher = walker.visit.matcher
            if reason := matcher.error:
                errors[walker.visit.request.request_id] = _cannot_go_on(reason)
            matcher.rollback(walker.num_passed)
        return Walked(masks[: len(logits)], logits, runs, errors)

    def _visit_drafts(self, walkers: Sequence[_Walker], masks: Words) -> list[int]:
        """Fill the masks after each request's tokens and after its drafts, as far as these are legal."""
        logits: list[int] = []
        walking, depth = list(walkers), 0
        while walking:
            self._fill(walking, masks[len(logits) :])
            logits += [walker.visit.first_logit + depth for walker in walking]
            walking = [w for w in walking if depth < len(w.visit.drafts) and w.go_on(w.visit.drafts[depth])]
            depth += 1
        for walker in walkers:
            walker.num_accepted = walker.num_passed
        return logits

    def follow_certain(self, walkers: Sequence[_Walker]) -> list[CertainRun]:
        """Where the token after the last legal draft is certain: those after it that are, for the next step to verify.

        A certain token before that one is a draft itself, so it is accepted and nothing is drawn in its place.
        """
        going = [(w, token_id) for w in walkers if w.visit.num_next and (token_id := only_token(w.mask)) is not None]
        masks = np.zeros((len(going), self._num_words), dtype=np.int32)
        while going:
            walking = [w for w, token_id in going if len(w.run) < w.visit.num_next and w.go_on(token_id)]
            self._fill(walking, masks)
            going = [(w, token_id) for w in walking if (token_id := only_token(w.mask)) is not None]
            for walker, token_id in going:
                walker.run.append(token_id)
        return [CertainRun(w.visit.place, w.num_accepted, w.run) for w in walkers if w.run]

    def _fill(self, walkers: Sequence[_Walker], masks: Words) -> None:
        """The mask of each one's next token, into the first rows."""
        self._backend.fill([(walker.visit.matcher, i) for i, walker in enumerate(walkers)], masks)
        for i, walker in enumerate(walkers):
            walker.mask = masks[i]
            self._hold_back_ends(walker)

    def _hold_back_ends(self, walker: _Walker) -> None:
        """Tokens that end the text are drawn only where they may be, unless nothing else is legal."""
        visit, mask = walker.visit, walker.mask
        params = visit.request.params
        if visit.num_output + walker.num_passed < params.min_tokens:
            held: Sequence[int] = visit.request.stop_token_ids
        elif params.ignore_eos:
            held = self._eos_token_ids
        else:
            return
        kept = mask.view(np.uint32).copy()
        for token_id in held:
            kept[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)
        if kept.any():
            mask[:] = kept.view(np.int32)


def only_token(mask: Words) -> int | None:
    """The token that a mask allows, if it is a single one."""
    (places,) = np.nonzero(mask)
    if len(places) != 1:
        return None
    word = int(mask.view(np.uint32)[places[0]])
    return None if word & (word - 1) else int(places[0]) * 32 + word.bit_length() - 1


def _cannot_go_on(reason: str) -> str:
    return f"the grammar of this request cannot go on: {reason}"


def _num_before_end(visit: Visit) -> int:
    """New tokens that the matcher must take in: the one that ends the text may be none of the grammar's."""
    stop_ids = visit.request.stop_token_ids
    return next((i for i, token_id in enumerate(visit.new) if token_id in stop_ids), len(visit.new))
