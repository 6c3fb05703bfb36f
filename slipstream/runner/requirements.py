"""The requirements of requests on their steps, by row: kinds of sampling, drafts, log probabilities of prompts.

A request's requirements are fixed when it is assigned to a row. Those of a composition follow from its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from slipstream.graphs.descriptor import Tier
from slipstream.plan import Composition, RowInit
from slipstream.sampling.operation import SamplingOperation
from slipstream.sampling.sampler import NO_NEEDS, NOISE_ALONE, SamplingNeeds


@dataclass(frozen=True, slots=True)
class Drafting:
    """The drafter's work after a step with requests to draft for."""

    noise: bool  # one of those requests is not greedy
    proposes: bool = True  # otherwise it only processes the step


class Requirements(NamedTuple):
    """The requirements of one composition."""

    sampling: SamplingNeeds
    drafting: Drafting | None
    scores_prompts: bool
    # What a graph of the whole step must contain: all sampling in tier ``fast``, and the proposed drafts.
    tier: Tier
    num_drafts: int
    is_constrained: bool  # a request has a grammar: the head waits for the host's masks


class RowRequirements:
    def __init__(
        self, num_rows: int, operations: Sequence[SamplingOperation], max_drafts: int, shows_every_step: bool
    ) -> None:
        self._operations, self._max_drafts = operations, max_drafts
        self._shows_every_step = shows_every_step  # the drafter processes every step, whether it proposes drafts or not
        self._kinds = [NO_NEEDS]  # every kind of sampling that a request has needed so far
        self._kind_of_row = [0] * num_rows
        self._num_drafts = [0] * num_rows  # maximum proposed for the row
        self._is_constrained = [False] * num_rows
        self._scored_prompt_len = [0] * num_rows  # prompt tokens to score; 0 for most

    def move_in(self, init: RowInit) -> None:
        """The row is assigned to another request."""
        row, request = init.row, init.request
        needs = SamplingNeeds.for_request(request, self._operations)
        if needs not in self._kinds:
            self._kinds.append(needs)
        self._kind_of_row[row] = self._kinds.index(needs)
        self._num_drafts[row] = request.num_drafts(self._max_drafts)
        self._is_constrained[row] = request.is_constrained
        scored = request.params.prompt_logprobs is not None
        self._scored_prompt_len[row] = len(request.prompt_token_ids) if scored else 0

    def scored_prompt_len(self, row: int) -> int:
        return self._scored_prompt_len[row]

    def of_composition(self, composition: Composition) -> Requirements:
        sampling, drafting = self._sampling_of(composition), self._drafting_of(composition)
        scores_prompts = any(self._scored_prompt_len[row] for row in composition.rows)
        tier: Tier = "fast" if (sampling | NOISE_ALONE) == NOISE_ALONE else "full"
        num_drafts = composition.num_next_drafts if drafting and tier == "fast" else 0
        is_constrained = any(self._is_constrained[row] for row in composition.rows)
        # No graph includes older tokens, or what waits for the host.
        if composition.num_caught_up or is_constrained:
            tier, num_drafts = "full", 0
        return Requirements(sampling, drafting, scores_prompts, tier, num_drafts, is_constrained)

    def _sampling_of(self, composition: Composition) -> SamplingNeeds:
        pairs = zip(composition.rows, composition.samples, strict=True)
        needs = NO_NEEDS
        for kind in {self._kind_of_row[row] for row, samples in pairs if samples}:
            needs |= self._kinds[kind]
        return needs

    def _drafting_of(self, composition: Composition) -> Drafting | None:
        """None if no request is drafted for, or the drafter does not need the step.

        A request that samples nothing in this step may be drafted for: with one token of its prompt left.
        """
        proposes = composition.num_next_drafts > 0
        if not proposes and not self._shows_every_step:
            return None
        rows = [row for row in composition.rows if self._num_drafts[row]]
        kinds = {self._kind_of_row[row] for row in rows}
        return Drafting(any(self._kinds[kind].noise for kind in kinds), proposes) if rows else None
