"""Which graphs of whole steps exist and when each is captured, from the draft lengths alone.

Pure decisions: knows neither devices nor tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipstream.graphs.descriptor import BatchExecutionDescriptor, GraphKind
from slipstream.graphs.mode import CUDAGraphMode
from slipstream.speculative_config import SpeculativeConfig

# When a graph is captured: before the first step, or in this order whenever the engine is idle.
AT_START, FIRST, SECOND, THIRD, LAST = range(5)
# Tokens of mixed batches that are captured at the start. With many decodes, up to twice as many tokens as those.
_SMALLEST_MIXED, _LARGEST_MIXED = 16, 512
# Limit on tokens of graphs for other than the initial draft length. No GPU gains from drafts in larger batches.
_MAX_DECODE_TOKENS = 512
_MAX_TIMED_REQS = 16  # where steps are launched operation by operation


def _same_number(num_checked: int) -> int:
    return num_checked


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """The kinds of steps that the draft lengths allow, and the order in which their graphs are captured."""

    lengths: Sequence[int]  # drafts that a step may verify, ascending
    initial: int  # the length of the first steps
    checks_trials: bool = True  # False where acceptance is known without verification
    num_proposed: Callable[[int], int] = _same_number  # drafts that a step proposes if the next one verifies that many

    @classmethod
    def for_config(cls, speculative: SpeculativeConfig | None) -> GraphPlan:
        if speculative is None:
            return cls((0,), 0)
        initial, checks_trials = speculative.initial_length, not speculative.knows_acceptance
        return cls(speculative.lengths, initial, checks_trials, speculative.num_proposed)

    def kinds(self) -> list[GraphKind]:
        """Every kind of graph that a step could use.

        A step with an unchanged draft length runs in one graph, as does one that tries the next longer length or
        returns from it. Any other step has a graph for the target, and the drafter has its own.
        """
        lengths, proposed = sorted({0, *self.lengths}), self.num_proposed
        kinds = [GraphKind(1 + k, "fast", proposed(k)) for k in lengths]
        for shorter, longer in itertools.pairwise(lengths) if len(self.lengths) > 1 else ():
            kinds += [GraphKind(1 + shorter, "fast", proposed(longer))]
            if shorter or self.checks_trials:
                kinds += [GraphKind(1 + longer, "fast", proposed(shorter))]
        with_prompts = {proposed(k) for k in {0, self.initial} & {self.initial, *self.lengths}}
        kinds += [GraphKind(None, "fast", k) for k in sorted(with_prompts)]
        # If every step proposes the same number, several of these are equal.
        return [*dict.fromkeys(kinds), *(GraphKind(1 + k, "full") for k in lengths), GraphKind(None, "full")]

    def order(self, desc: BatchExecutionDescriptor, largest_decode: int) -> int | None:
        """When to capture the graph; None: never.

        At the start, the graphs that the first requests are likely to use: sampling inside, and sizes that are powers
        of two, so that every batch fits into a graph of at most twice its size. Until the others are captured, their
        batches run in a larger graph or launch by launch.
        """
        is_mixed = desc.query_len is None
        size = desc.num_tokens if is_mixed else desc.num_reqs
        if size & (size - 1) and (is_mixed or size != largest_decode):
            return LAST if is_mixed or self._has_every_size(desc) else None
        return self._order_mixed(desc, largest_decode) if is_mixed else self._order_decode(desc)

    def _has_every_size(self, desc: BatchExecutionDescriptor) -> bool:
        """Sizes between the powers of two are only for the most frequent decodes."""
        return desc.query_len == 1 + self.initial or (desc.query_len == 1 and desc.num_drafts <= self._shortest)

    def _order_mixed(self, desc: BatchExecutionDescriptor, largest_decode: int) -> int:
        if desc.num_tokens > max(_LARGEST_MIXED, 2 * largest_decode):
            return LAST  # they need much memory
        if desc.tier != "fast":
            return SECOND
        is_initial = desc.num_drafts == self.num_proposed(self.initial)
        return AT_START if is_initial and desc.num_tokens >= _SMALLEST_MIXED else FIRST

    def _order_decode(self, desc: BatchExecutionDescriptor) -> int | None:
        assert desc.query_len is not None
        num_checked = desc.query_len - 1
        # A graph is useful only together with one for the next step, which verifies what this one has proposed.
        next_checked = [k for k in {0, *self.lengths} if self.num_proposed(k) == desc.num_drafts]
        if not self._may_pay(desc.num_reqs, num_checked):
            return None
        if not any(self._may_pay(desc.num_reqs, k) for k in next_checked):
            return None
        is_initial = num_checked == self.initial
        if desc.tier != "fast":
            return FIRST if is_initial else THIRD
        if desc.num_drafts == self.num_proposed(num_checked):
            return AT_START if is_initial else FIRST if num_checked == 0 else SECOND
        return FIRST if {num_checked, desc.num_drafts} == {0, self._shortest} else THIRD

    @property
    def _shortest(self) -> int:
        """Drafts that a step proposes when drafting begins."""
        return self.num_proposed(min((k for k in self.lengths if k), default=0))

    def _may_pay(self, num_reqs: int, num_checked: int) -> bool:
        return num_checked in (0, self.initial) or num_reqs * (1 + num_checked) <= _MAX_DECODE_TOKENS

    def gives_cost(self, desc: BatchExecutionDescriptor) -> bool:
        """Whether the graph's time is the cost of its draft length: steps of this kind can follow each other."""
        if desc.query_len is None or desc.tier != "fast" or desc.mode is not CUDAGraphMode.FULL:
            return False
        return desc.num_drafts == self.num_proposed(desc.query_len - 1)

    def launched_steps(self, max_num_reqs: int) -> list[tuple[int, int]]:
        """Requests and drafts of the steps to time where decodes have no graphs, smallest batches first."""
        most = min(max_num_reqs, _MAX_TIMED_REQS)
        powers = itertools.takewhile(lambda n: n <= most, (1 << i for i in range(16)))
        return [(num_reqs, k) for num_reqs in powers for k in self.lengths]
