"""The cost of steps by batch and drafts: measured when idle, interpolated between the measurements."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

_RATE, _DRIFT, _HELD_UP = 1 / 8, 1 / 64, 1.5  # weight of a real step, of its effect on other lengths; outlier limit


class StepCosts:
    """Seconds of steps by verified drafts, with the usual proposal after them. Sparse: a few values of each number.

    With graphs, a batch costs as much as the graph that it is padded to, and a length without a graph for it is not
    available. Otherwise the cost of a batch between measured ones follows its number of tokens, and real steps correct
    the measurements by a factor for each length: sampling with noise costs more than greedy decoding, and a CPU may be
    shared. A length that was never used has the mean factor of the others.
    """

    def __init__(self, in_graphs: bool) -> None:
        self._in_graphs = in_graphs
        self._sizes: dict[int, list[int]] = {}  # by draft length, ascending
        self._seconds: dict[tuple[int, int], float] = {}
        self._by_tokens: list[tuple[int, float]] = []  # of all measurements, ascending
        self._factors: dict[int, float] = {}  # by draft length: real seconds per measured second
        self._known: dict[tuple[int, int], float | None] = {}  # cached results
        self.version = 0  # increases with every measurement

    def record(self, num_reqs: int, num_drafts: int, seconds: float) -> None:
        if (num_reqs, num_drafts) not in self._seconds:
            bisect.insort(self._sizes.setdefault(num_drafts, []), num_reqs)
        self._seconds[num_reqs, num_drafts] = seconds
        by_tokens: dict[int, float] = {}
        for (size, drafts), cost in sorted(self._seconds.items()):
            by_tokens[size * (1 + drafts)] = max(cost, by_tokens.get(size * (1 + drafts), 0.0))
        self._by_tokens = sorted(by_tokens.items())
        self._known.clear()
        self.version += 1

    def observe(self, num_reqs: int, num_drafts: int, seconds: float) -> None:
        """The seconds of a real step."""
        measured = self._measured(num_reqs, num_drafts)
        if measured is None or self._in_graphs:
            return
        before = self._factor(num_drafts)
        self._known.clear()
        # An outlier has little weight.
        factor = min(seconds / measured, _HELD_UP * before)
        now = self._factors[num_drafts] = before + _RATE * (factor - before)
        # Effects common to all lengths, such as other load on the machine, change with time: old values are forgotten.
        for length, other in self._factors.items():
            self._factors[length] = other + _DRIFT * (now - other)

    def _factor(self, num_drafts: int) -> float:
        usual = sum(self._factors.values()) / len(self._factors) if self._factors else 1.0
        return self._factors.get(num_drafts, usual)

    def seconds(self, num_reqs: int, num_drafts: int) -> float | None:
        """None if nothing is known, or no graph fits the batch."""
        asked = (num_reqs, num_drafts)
        if asked not in self._known:
            measured = self._measured(num_reqs, num_drafts)
            self._known[asked] = None if measured is None else measured * self._factor(num_drafts)
        return self._known[asked]

    def _measured(self, num_reqs: int, num_drafts: int) -> float | None:
        sizes = self._sizes.get(num_drafts, [])
        at = bisect.bisect_left(sizes, num_reqs)
        if at < len(sizes):
            size = sizes[at]
            if self._in_graphs:
                return self._seconds[size, num_drafts]
            # A step with more drafts does more. If it was measured as faster, this one was held up by something else.
            return min(s for (reqs, drafts), s in self._seconds.items() if reqs == size and drafts >= num_drafts)
        if self._in_graphs:
            return None
        return _between(self._by_tokens, num_reqs * (1 + num_drafts))


def _between(points: Sequence[tuple[int, float]], x: int) -> float | None:
    """Linear interpolation between the two nearest points, and extrapolation beyond the last."""
    if len(points) < 2:
        return None
    at = min(max(bisect.bisect_left(points, x, key=lambda p: p[0]), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    return max(y0 + (y1 - y0) * (x - x0) / (x1 - x0), points[0][1] / 2)
