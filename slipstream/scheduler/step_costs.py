"""What a step costs by its batch and its drafts: measured where there is time for it, read between the measurements."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

_RATE, _DRIFT, _HELD_UP = 1 / 8, 1 / 64, 1.5  # of what real steps say; of what they say of others; of the usual time


class StepCosts:
    """Seconds of steps by the drafts they check, and make as usual behind that. Sparse: a few sizes of each number.

    Where steps run in graphs, a batch costs what the graph costs that it is padded to, and a length without a graph for
    it is not on offer. Elsewhere a batch between the measured ones costs what its number of tokens says, and real steps
    put the measurements right, by a factor for each length: drawing at random costs what greedy requests do not pay,
    and a CPU may have others to serve. A length that nobody has used has the others' factor.
    """

    def __init__(self, in_graphs: bool) -> None:
        self._in_graphs = in_graphs
        self._sizes: dict[int, list[int]] = {}  # by draft length, ascending
        self._seconds: dict[tuple[int, int], float] = {}
        self._by_tokens: list[tuple[int, float]] = []  # of everything measured, ascending
        self._factors: dict[int, float] = {}  # by draft length: real seconds for a measured one
        self._known: dict[tuple[int, int], float | None] = {}  # what was asked before
        self.version = 0  # moves on with every measurement

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
        """So long a real step took."""
        measured = self._measured(num_reqs, num_drafts)
        if measured is None or self._in_graphs:
            return
        before = self._factor(num_drafts)
        self._known.clear()
        # A step that was held up says little.
        factor = min(seconds / measured, _HELD_UP * before)
        now = self._factors[num_drafts] = before + _RATE * (factor - before)
        # What all lengths have in common, such as others on the machine, changes with time: what is old is forgotten.
        for length, other in self._factors.items():
            self._factors[length] = other + _DRIFT * (now - other)

    def _factor(self, num_drafts: int) -> float:
        usual = sum(self._factors.values()) / len(self._factors) if self._factors else 1.0
        return self._factors.get(num_drafts, usual)

    def seconds(self, num_reqs: int, num_drafts: int) -> float | None:
        """None where nothing is known, or no graph would take the batch."""
        asked = (num_reqs, num_drafts)
        if asked not in self._known:
            measured = self._measured(num_reqs, num_drafts)
            self._known[asked] = None if measured is None else measured * self._factor(num_drafts)
        return self._known[asked]

    def _measured(self, num_reqs: int, num_drafts: int) -> float | None:
        sizes = self._sizes.get(num_drafts, [])
        at = bisect.bisect_left(sizes, num_reqs)
        if at < len(sizes):
            return self._seconds[sizes[at], num_drafts]
        if self._in_graphs:
            return None
        return _between(self._by_tokens, num_reqs * (1 + num_drafts))


def _between(points: Sequence[tuple[int, float]], x: int) -> float | None:
    """On the line through the two nearest points; beyond the last, on the last line."""
    if len(points) < 2:
        return None
    at = min(max(bisect.bisect_left(points, x, key=lambda p: p[0]), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    return max(y0 + (y1 - y0) * (x - x0) / (x1 - x0), points[0][1] / 2)
