"""Counters shared by the front ends of one server: each adds to its own row and reads the sum of all rows.

The rows are in one memory-mapped file, so nothing is sent and nothing waits. When a front end ends, its row keeps the
totals; only the gauges of requests under way are cleared.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_FLOAT_BYTES = 8


class CounterLayout:
    """Names and their indices in a row; the same in every process."""

    def __init__(self, names: Sequence[str]) -> None:
        self.indices = {name: i for i, name in enumerate(names)}

    def __len__(self) -> int:
        return len(self.indices)


class SharedCounters:
    """``path`` names a file made by ``create``; None where there is one front end."""

    def __init__(self, layout: CounterLayout, path: Path | None = None, row: int = 0, num_rows: int = 1) -> None:
        self.layout = layout
        self._num_rows = num_rows
        size = max(1, num_rows * len(layout)) * _FLOAT_BYTES
        if path is None:
            self._map = mmap.mmap(-1, size)
        else:
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), size)
        self._values: Any = memoryview(self._map).cast("d")
        self._first = row * len(layout)

    @staticmethod
    def create(path: Path, layout: CounterLayout, num_rows: int) -> None:
        path.write_bytes(bytes(num_rows * len(layout) * _FLOAT_BYTES))

    def add(self, name: str, amount: float = 1.0) -> None:
        self._values[self._first + self.layout.indices[name]] += amount

    def total(self, name: str) -> float:
        index = self.layout.indices[name]
        return float(sum(self._values[row * len(self.layout) + index] for row in range(self._num_rows)))

    def clear(self, name: str, row: int) -> None:
        """Reset a gauge of a front end that has ended."""
        self._values[row * len(self.layout) + self.layout.indices[name]] = 0.0

    def histogram(self, name: str, edges: Sequence[float]) -> SharedHistogram:
        return SharedHistogram(self, name, edges)

    def slots(self, names: Sequence[str]) -> tuple[Any, list[int]]:
        """The array of all values and the indices of these names in it, for counters updated with every token."""
        return self._values, [self._first + self.layout.indices[name] for name in names]


def histogram_names(name: str, edges: Sequence[float]) -> list[str]:
    return [*(f"{name}:{edge}" for edge in edges), f"{name}:+Inf", f"{name}:sum"]


class SharedHistogram:
    def __init__(self, counters: SharedCounters, name: str, edges: Sequence[float]) -> None:
        self._counters = counters
        self._edges = tuple(edges)
        self._names = histogram_names(name, edges)
        self._values, (*self._buckets, self._sum) = counters.slots(self._names)

    def observe(self, value: float, times: int = 1) -> None:
        values = self._values
        values[self._buckets[bisect_left(self._edges, value)]] += times
        values[self._sum] += value * times

    def totals(self) -> tuple[list[tuple[str, float]], float]:
        """Counts up to each edge, and the sum of all values."""
        seen, buckets = 0.0, []
        for edge, name in zip((*map(str, self._edges), "+Inf"), self._names, strict=False):
            seen += self._counters.total(name)
            buckets.append((edge, seen))
        return buckets, self._counters.total(self._names[-1])
