"""Scores of pairs of texts: by a model that reads both at once, or by the cosine of two vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slipstream.engine.pooled_prompt import TextPair
from slipstream.errors import RequestError
from slipstream.pooling import PoolingDefaults

Numbers = npt.NDArray[np.floating]


@dataclass(frozen=True)
class PairScores:
    """What is submitted for a list of pairs, and which of it makes each pair's score."""

    items: Sequence[str | TextPair]
    pairs: Sequence[tuple[int, int]]  # items of each pair, the same twice where an item is a pair

    @property
    def are_scored(self) -> bool:
        """Whether the items are pairs that the model scores; otherwise they are texts for vectors."""
        return bool(self.items) and isinstance(self.items[0], TextPair)

    @classmethod
    def plan(cls, defaults: PoolingDefaults, first: Sequence[str], second: Sequence[str]) -> PairScores:
        """One with each of the others, or as many of both."""
        if len(first) not in (1, len(second)):
            raise RequestError(
                f"{len(first)} texts cannot be paired with {len(second)}; give one text, or as many as there are others"
            )
        count = len(second)
        if defaults.scoring is None:
            firsts = [0] * count if len(first) == 1 else list(range(count))
            return cls([*first, *second], [(idx, len(first) + i) for i, idx in enumerate(firsts)])
        if (num_labels := len(defaults.scoring.labels)) != 1:
            raise RequestError(f"this checkpoint tells {num_labels} classes apart and gives no score; call classify")
        firsts_of = list(first) * (count if len(first) == 1 else 1)
        pairs = [TextPair(*texts) for texts in zip(firsts_of, second, strict=True)]
        return cls(pairs, [(i, i) for i in range(count)])

    def of(self, found: Sequence[Numbers]) -> list[float]:
        """The scores, given the results of all items: scores, or vectors of any length."""
        if self.are_scored:
            return [float(values[0]) for values in found]
        units = [values.astype(np.float64) / max(float(np.linalg.norm(values)), 1e-300) for values in found]
        return [float(units[a] @ units[b]) for a, b in self.pairs]


def rank(scores: Sequence[float], top_n: int | None) -> list[int]:
    """Indices from the highest score to the lowest; the first of equal ones first."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    return order[:top_n]
