"""What a step costs by its batch and its drafts: measured where there is time for it, read between the measurements.

Real steps put the measurements right. In graphs, what a step takes more than was measured: keys are read that were not
there, and a GPU that works without a pause is slower than one that is timed alone, the more so the more it computes.
Elsewhere a factor: drawing at random costs what greedy requests do not pay, and a CPU may have others to serve.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from statistics import median

_HELD_UP = 1.5  # times the usual: a step that took longer says little, and the next one ends so much sooner
_RATE, _DRIFT = 1 / 8, 1 / 64  # without graphs: of what real steps say; of what they say of others
_RATE_IN_GRAPHS, _FORGETTING = 1 / 16, 1 / 1024  # in graphs: of what real steps say; of what lengths not in use cost
# Steps behind a change of the length that say what it costs more than the other, and how many of them are looked at
# together, for one may have been held up.
_SETTLED, _NUM_FIRST = 16, 3


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
        self._factors, self._extras = _Factors(), _Extras()
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

    def observe(self, num_reqs: int, num_drafts: int, seconds: float) -> None:
        """So long a real step took."""
        if self._in_graphs:
            size = self._padded(num_reqs, num_drafts)
            if size is not None:
                self._extras.learn(size, num_drafts, self._seconds[size, num_drafts], seconds)
        elif (measured := self._measured(num_reqs, num_drafts)) is not None:
            self._factors.learn(num_drafts, measured, seconds)

    def interrupt(self) -> None:
        """Somebody has come: steps behind this are not to be compared with those before."""
        self._extras.interrupt()

    def seconds(self, num_reqs: int, num_drafts: int) -> float | None:
        """None where nothing is known, or no graph would take the batch."""
        if self._in_graphs:
            size = self._padded(num_reqs, num_drafts)
            return None if size is None else self._seconds[size, num_drafts] + self._extras.of(size, num_drafts)
        measured = self._measured(num_reqs, num_drafts)
        return None if measured is None else measured * self._factors.of(num_drafts)

    def _padded(self, num_reqs: int, num_drafts: int) -> int | None:
        sizes = self._sizes.get(num_drafts, [])
        at = bisect.bisect_left(sizes, num_reqs)
        return sizes[at] if at < len(sizes) else None

    def _measured(self, num_reqs: int, num_drafts: int) -> float | None:
        size = self._padded(num_reqs, num_drafts)
        if size is not None:
            return self._seconds[size, num_drafts]
        return _between(self._by_tokens, num_reqs * (1 + num_drafts))


class _Factors:
    """By draft length, real seconds for a measured one. A length that nobody has used has the others' factor."""

    def __init__(self) -> None:
        self._known: dict[int, float] = {}

    def of(self, num_drafts: int) -> float:
        usual = sum(self._known.values()) / len(self._known) if self._known else 1.0
        return self._known.get(num_drafts, usual)

    def learn(self, num_drafts: int, measured: float, seconds: float) -> None:
        before = self.of(num_drafts)
        factor = min(seconds / measured, _HELD_UP * before)
        now = self._known[num_drafts] = before + _RATE * (factor - before)
        # What all lengths have in common, such as others on the machine, changes with time: what is old is forgotten.
        for length, other in self._known.items():
            self._known[length] = other + _DRIFT * (now - other)


class _Extras:
    """By padded size and draft length, real seconds above the measured ones: a part that all lengths of a size have in
    common, as texts grow and shrink, and one of each length's own, which is 0 for the shortest and never less for one
    that is longer, for it computes more.

    A length's own shows right behind a change from another one, where all else is the same. It is forgotten slowly, in
    case all else was not. A length shorter than all that were used is taken to be as cheap as measured, so that it will
    be used if that would pay.
    """

    def __init__(self) -> None:
        self._common: dict[int, float] = {}  # by size
        self._own: dict[int, dict[int, float]] = {}  # by size and length
        self._last: tuple[int, int] | None = None
        self._num_alike, self._compares = 0, False  # steps in a row; whether they came right behind another length
        self._first: list[float] = []  # what the first of them took

    def interrupt(self) -> None:
        self._last = None

    def of(self, size: int, num_drafts: int) -> float:
        own = self._own.get(size, {})
        if all(num_drafts < length for length in own):
            return 0.0
        return max(0.0, self._common.get(size, 0.0) + _own_of(own, num_drafts))

    def learn(self, size: int, num_drafts: int, measured: float, seconds: float) -> None:
        if self._last != (size, num_drafts):
            self._num_alike, self._compares = 0, self._last is not None and self._last[0] == size
            self._last = (size, num_drafts)
            self._first.clear()
        self._num_alike += 1
        if self._num_alike <= _NUM_FIRST:
            self._first.append(seconds)
            if self._num_alike < _NUM_FIRST:
                return
        own, common = self._own.setdefault(size, {}), self._common.get(size, 0.0)
        own.setdefault(num_drafts, _own_of(own, num_drafts))
        before = max(measured / _HELD_UP, measured + common + own[num_drafts])
        if self._num_alike == _NUM_FIRST:
            change = median(self._first) - before
        else:
            error = min(max(seconds, before / _HELD_UP), _HELD_UP * before) - before
            change = max(1 / self._num_alike, _RATE_IN_GRAPHS) * error
        if self._compares and self._num_alike <= _SETTLED:
            own[num_drafts] += change
        else:
            common += change
        now, least = own[num_drafts], min(own[min(own)], own[num_drafts])
        for length, extra in own.items():
            if length != num_drafts:
                extra = min(extra, now) if length < num_drafts else max(extra, now)
                own[length] = (extra - least) * (1.0 - _FORGETTING)
        own[num_drafts], self._common[size] = now - least, common + least


def _own_of(own: Mapping[int, float], num_drafts: int) -> float:
    return own.get(num_drafts, max((extra for length, extra in own.items() if length < num_drafts), default=0.0))


def _between(points: Sequence[tuple[int, float]], x: int) -> float | None:
    """On the line through the two nearest points; beyond the last, on the last line."""
    if len(points) < 2:
        return None
    at = min(max(bisect.bisect_left(points, x, key=lambda p: p[0]), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    return max(y0 + (y1 - y0) * (x - x0) / (x1 - x0), points[0][1] / 2)
