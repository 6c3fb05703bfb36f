"""Worlds in which texts are pooled beside requests that generate, in every graph mode and with any steps in flight."""

from __future__ import annotations

import pytest

from slipstream.config import GRAPH_MODES
from tests.sim.world import POOLED, World

EVENTS = frozenset({POOLED, "graphs", "few_pages", "late_arrivals", "prefix_caching", "shared_prefixes", "priorities"})


@pytest.mark.parametrize("steps_in_flight", [1, 3])
@pytest.mark.parametrize("mode", GRAPH_MODES)
def test_vectors_in_every_graph_mode(steps_in_flight: int, mode: str) -> None:
    found = 0
    for seed, events in enumerate((EVENTS, EVENTS | {"drafts", "aborts"}), start=1):
        world = World(seed, {"steps_in_flight": steps_in_flight, "cudagraph_mode": mode}, events)
        world.run()
        found += world.num_vectors
    assert found > 2


def test_both_kinds_share_steps() -> None:
    """Else the worlds would prove little."""
    shared = 0
    for seed in range(3):
        world = World(seed, events=EVENTS)
        pooled = {job.request.request_id for job in world.jobs if job.request.pooling is not None}
        assert 0 < len(pooled) < len(world.jobs)
        world.run()
        shared += world.num_shared
    assert shared > 5
