"""What a step costs by its batch and its drafts: measured where there is time for it, read between the measurements."""

from __future__ import annotations

import bisect
from collections.abc import Sequence


class StepCosts:
    """Seconds of steps that check and make equally many drafts. Sparse: a few sizes of each draft length.

    Where steps run in graphs, a batch costs what the graph costs that it is padded to, and a length without a graph for
    it is not on offer. Elsewhere a batch between the measured ones costs what its number of tokens says.
    """

    def __init__(self, in_graphs: bool) -> None:
        self._in_graphs = in_graphs
        self._sizes: dict[int, list[int]] = {}  # by draft length, ascending
        self._seconds: dict[tuple[int, int], float] = {}
        self._by_tokens: list[tuple[int, float]] = []  # of everything measured, ascending
        self.version = 0  # moves on with every measurement

    def record(self, num_reqs: int, num_drafts: int, seconds: float) -> None:
        if (num_reqs, num_drafts) not in self._seconds:
            bisect.insort(self._sizes.setdefault(num_drafts, []), num_reqs)
        self._seconds[num_reqs, num_drafts] = seconds
        by_tokens: dict[int, float] = {}
        for (size, drafts), cost in sorted(self._seconds.items()):
            by_tokens[size * (1 + drafts)] = max(cost, by_tokens.get(size * (1 + drafts), 0.0))
        self._by_tokens = sorted(by_tokens.items())
        self.version += 1

    def seconds(self, num_reqs: int, num_drafts: int) -> float | None:
        """None where nothing is known, or no graph would take the batch."""
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
