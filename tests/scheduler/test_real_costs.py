"""Draft lengths on a GPU that serves: batches of several sizes, each with texts that start anew and grow."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from slipstream.scheduler.draft_length import AdaptiveLength
from slipstream.scheduler.step_costs import StepCosts
from slipstream.types import Composition
from tests.scheduler.test_draft_length import CHOICES, HIGH, LOW, ZERO

# Milliseconds as measured, by requests and drafts of each: about those of a model of 8 billion weights.
MEASURED = {
    32: dict(zip(CHOICES, (4.5, 5.0, 5.4, 5.9, 7.0, 8.2), strict=True)),
    64: dict(zip(CHOICES, (5.1, 5.9, 6.8, 7.8, 10.0, 12.0), strict=True)),
}
Rates = tuple[float, ...]


class Serving:
    """One policy for batch after batch. A step takes what was measured, by a factor for each length, and its texts."""

    def __init__(self, factor: Callable[[int], float] = lambda k: 1.0, late_ms: float = 0.0, seed: int = 0) -> None:
        costs = StepCosts(in_graphs=True)
        for size, row in MEASURED.items():
            for k, milliseconds in row.items():
                costs.record(size, k, milliseconds / 1000)
        self.policy = AdaptiveLength(CHOICES, 3, max(MEASURED), costs)
        self._factor, self._late_ms, self._random = factor, late_ms, random.Random(seed)
        self._made, self._generation, self._now = 0, 0, 0.0
        self._known: dict[tuple[int, int, int], Composition] = {}
        self._flying: list[tuple[Composition, list[int], float]] = []
        self._collected: tuple[Composition, float] | None = None

    def cost(self, size: int, k: int) -> float:
        return MEASURED[size][k] * self._factor(k)

    def move_in(self, size: int) -> None:
        self._generation += 1
        self._known.clear()
        for row in range(size):
            self.policy.move_in(row)

    def run(self, size: int, rates: Rates, count: int, texts_ms: tuple[float, float]) -> float:
        """Tokens a millisecond, while what the texts take goes from one number to another."""
        begin, num_tokens = self._now, 0
        for i in range(count):
            num_tokens += self._step(size, rates, texts_ms[0] + (texts_ms[1] - texts_ms[0]) * i / count)
        return num_tokens / (self._now - begin)

    def _step(self, size: int, rates: Rates, texts_ms: float) -> int:
        check, make = self.policy.wanted()
        check = min(check, self._made)
        ids, ones = tuple(f"{self._generation}-{i}" for i in range(size)), (self._generation,) * size
        composition = self._known.setdefault(
            (size, check, make),
            Composition(
                *(ids, ones, tuple(range(size)), (1 + check,) * size, (True,) * size, (check,) * size),
                *(size * (1 + check), make),
            ),
        )
        draws = [self._random.random() for _ in range(size)]
        accepted = [sum(draw < rate for rate in rates[:check]) for draw in draws]
        self._now += (self.cost(size, check) + self.cost(size, make)) / 2 + texts_ms
        self._made = make
        self.policy.launched(composition)
        self.policy.look()
        self._flying.append((composition, accepted, self._now))
        if len(self._flying) == 2:
            self._collect(*self._flying.pop(0))
        return size + sum(accepted)

    def _collect(self, composition: Composition, accepted: list[int], done: float) -> None:
        self.policy.collected(composition, accepted)
        seen = done + self._late_ms * self._random.random()
        if self._collected is not None and self._collected[0] is composition:
            self.policy.took(composition, (seen - self._collected[1]) / 1000)
        self._collected = (composition, seen)

    def best(self, size: int, rates: Rates, texts_ms: float) -> float:
        return max(size * (1 + sum(rates[:k])) / (self.cost(size, k) + texts_ms) for k in CHOICES)

    def plain(self, size: int, texts_ms: float) -> float:
        return size / (self.cost(size, 0) + texts_ms)


def test_what_long_texts_cost_is_not_a_lengths_own() -> None:
    serving = Serving()
    serving.move_in(64)
    serving.run(64, HIGH, 1000, (0.0, 6.0))
    serving.run(32, HIGH, 60, (6.0, 6.0))  # half of them have ended
    serving.move_in(64)
    serving.run(64, ZERO, 100, (0.0, 0.2))
    assert serving.run(64, ZERO, 1000, (0.2, 1.0)) > 0.98 * serving.plain(64, 0.6)


def test_nor_where_nothing_was_drafted() -> None:
    serving = Serving()
    serving.move_in(64)
    serving.run(64, ZERO, 1000, (0.0, 6.0))
    serving.run(32, ZERO, 60, (6.0, 6.0))
    serving.move_in(64)
    serving.run(64, HIGH, 200, (0.0, 0.2))
    assert serving.run(64, HIGH, 1000, (0.2, 1.0)) > 0.97 * serving.best(64, HIGH, 0.6)


def test_batch_after_batch_nothing_adds_up() -> None:
    serving = Serving()
    for _ in range(20):
        serving.move_in(64)
        serving.run(64, HIGH, 256, (0.0, 0.5))
        serving.run(32, HIGH, 40, (0.25, 0.25))
    serving.move_in(64)
    serving.run(64, ZERO, 100, (0.0, 0.1))
    assert serving.run(64, ZERO, 1000, (0.1, 0.5)) > 0.98 * serving.plain(64, 0.3)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("slower", [0.0, 0.1])
def test_whatever_comes_it_is_near_the_best_and_not_slower_than_plain(seed: int, slower: float) -> None:
    """Batches at random, and a GPU that is slower at work than it was measured, the more so the more it computes."""
    serving, rng = Serving(lambda k: 1.0 + slower * k, late_ms=0.3, seed=seed), random.Random(seed)
    num_of_plain, num_of_best, num_batches = 0.0, 0.0, 40
    for _ in range(num_batches):
        size, rates = rng.choice([32, 64]), rng.choice([HIGH, LOW, ZERO])
        begin, end = sorted((rng.uniform(0.0, 2.0), rng.uniform(0.0, 2.0)))
        serving.move_in(size)
        found = serving.run(size, rates, 200, (begin, end))
        num_of_plain += found / serving.plain(size, (begin + end) / 2)
        num_of_best += found / serving.best(size, rates, (begin + end) / 2)
    assert num_of_plain / num_batches > 1.1
    assert num_of_best / num_batches > 0.96
