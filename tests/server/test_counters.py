"""Counts that several front ends share in one file."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.server.counters import CounterLayout, SharedCounters, histogram_names

EDGES = (0.1, 1.0)
LAYOUT = CounterLayout(["open", "refused", *histogram_names("wait", EDGES)])


@pytest.fixture
def rows(tmp_path: Path) -> list[SharedCounters]:
    path = tmp_path / "counters"
    SharedCounters.create(path, LAYOUT, 3)
    return [SharedCounters(LAYOUT, path, row, 3) for row in range(3)]


def test_all_see_the_sum(rows: list[SharedCounters]) -> None:
    for row, counters in enumerate(rows):
        counters.add("open", 10**row)
        counters.add("refused")
    for counters in rows:
        assert (counters.total("open"), counters.total("refused")) == (111, 3)


def test_what_was_under_way_ends_with_its_front_end(rows: list[SharedCounters]) -> None:
    for counters in rows:
        counters.add("open", 2)
        counters.add("refused")
    rows[0].clear("open", 1)
    assert [counters.total("open") for counters in rows] == [4, 4, 4]
    assert rows[1].total("refused") == 3, "what was counted has happened"


def test_a_histogram_counts_up_to_each_edge(rows: list[SharedCounters]) -> None:
    for counters, value in zip(rows, (0.1, 0.5, 3.0), strict=True):
        counters.histogram("wait", EDGES).observe(value)
    rows[0].histogram("wait", EDGES).observe(0.05, times=2)
    buckets, total = rows[2].histogram("wait", EDGES).totals()
    assert buckets == [("0.1", 3), ("1.0", 4), ("+Inf", 5)]
    assert total == pytest.approx(3.7)
