"""How long a step takes, as a function of its tokens and contexts: learnt from the steps that were collected.

Seconds are a sum of five rates, each times how much of it the step has (``StepRates``). The rates minimise the squared
relative error over the steps seen, old ones forgotten, so a step that a compiler or another process held up weighs
little. Steps are forgotten by kind (without prompts, with few tokens, with many): hours of decoding do not wipe out
what prompts cost, nor do small steps, whose tokens a GPU computes while it reads weights, what many tokens cost.

The result is a function of the steps and seconds it was told, and of nothing else.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.config import StepRates
from slipstream.plan import StepPlan

_KEPT = 0.95  # of the weight of earlier steps of a kind, with every one
_PRIOR = 0.001  # weight of the expected rates, in steps
_LEAST = 0.01  # of an expected rate: none is zero
_MAX_UNREAD = 256  # steps
_MANY_TOKENS = 512


class StepWork(NamedTuple):
    """What a step has to do, in the order of ``StepRates``."""

    num_steps: int = 1
    num_tokens: int = 0
    num_cached_keys: int = 0  # that decoding requests read
    num_pairs: int = 0  # of a prompt's token and a key that it attends to
    num_proposed: int = 0  # drafts of each request


def count_pairs(num_tokens: int, num_computed: int) -> int:
    """Of a chunk of a prompt: each token attends to all before it and to itself."""
    return num_tokens * num_computed + num_tokens * (num_tokens + 1) // 2


def work_of(plan: StepPlan) -> tuple[StepWork, bool]:
    """The work of a step, and whether it has prompts."""
    composition, bounds = plan.composition, plan.num_computed_bounds
    num_tokens, num_drafts = composition.num_tokens, composition.num_drafts
    num_decodes, num_pairs = composition.num_reqs, 0
    # Decodes come first in every plan.
    while num_decodes and not (
        composition.samples[num_decodes - 1] and num_tokens[num_decodes - 1] == 1 + num_drafts[num_decodes - 1]
    ):
        num_decodes -= 1
        num_pairs += count_pairs(num_tokens[num_decodes], int(bounds[num_decodes]))
    num_cached = int(bounds[:num_decodes].sum(dtype=np.int64))
    work = StepWork(1, composition.total_tokens, num_cached, num_pairs, composition.num_next_drafts)
    return work, num_decodes < composition.num_reqs


class _Seen:
    """Sums over the steps of one kind."""

    def __init__(self) -> None:
        size = len(StepRates._fields)
        self.products: npt.NDArray[np.float64] = np.zeros((size, size))
        self.sums: npt.NDArray[np.float64] = np.zeros(size)

    def add(self, shares: npt.NDArray[np.float64]) -> None:
        self.products *= _KEPT
        self.products += np.outer(shares, shares)
        self.sums *= _KEPT
        self.sums += shares


class StepModel:
    def __init__(self, expected: StepRates) -> None:
        self._expected = np.array(expected)
        self._rates = expected
        self._decodes, self._with_few, self._with_many = self._seen = (_Seen(), _Seen(), _Seen())
        # Read when a cost is asked for, which steps that only decode do not.
        self._unread: deque[tuple[StepPlan, float]] = deque(maxlen=_MAX_UNREAD)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """A step that was collected, and how long the device took for it."""
        if seconds > 0.0:
            self._unread.append((plan, seconds))

    @property
    def rates(self) -> StepRates:
        if self._unread:
            while self._unread:
                plan, seconds = self._unread.popleft()
                work, has_prompts = work_of(plan)
                with_prompts = self._with_many if work.num_tokens >= _MANY_TOKENS else self._with_few
                seen = with_prompts if has_prompts else self._decodes
                seen.add(self._expected * np.array(work, dtype=np.float64) / seconds)
            self._rates = self._solve()
        return self._rates

    def seconds(self, work: StepWork) -> float:
        return sum(rate * amount for rate, amount in zip(self.rates, work, strict=True))

    def _solve(self) -> StepRates:
        """Factors of the expected rates; one that would be too small is held at the least, and the others follow."""
        size = len(self._expected)
        products, sums = _PRIOR * np.eye(size), np.full(size, _PRIOR)
        for seen in self._seen:
            products += seen.products
            sums += seen.sums
        factors = np.full(size, _LEAST)
        free = np.ones(size, dtype=bool)
        for _ in range(size):
            held = products[np.ix_(free, ~free)] @ factors[~free]
            factors[free] = np.linalg.solve(products[np.ix_(free, free)], sums[free] - held)
            too_small = free & (factors < _LEAST)
            if not too_small.any():
                break
            factors[too_small] = _LEAST
            free &= ~too_small
        return StepRates(*(self._expected * factors).tolist())
