"""Steps in halves on the simulated device: right whatever the cut, and a cut that reads the device is found."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.device.sync_guard import HostSyncError
from slipstream.runner import micro_batches
from tests.sim.world import POOLED, World

EVENTS = frozenset({POOLED, "few_pages", "late_arrivals", "aborts", "noise"})
OPTIONS: dict[str, Any] = {"cudagraph_mode": "none", "steps_in_flight": 3, "cascade": "never"}
KINDS = [{}, {"is_recurrent": True}, {"is_latent": True}, {"is_sparse": True}]


def run(seed: int, kind: dict[str, bool], events: frozenset[str] = EVENTS) -> World:
    world = World(seed, {**OPTIONS, "speculative_config": None}, events, is_split=True, **kind)
    world.run()
    return world


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_any_cut_for_every_kind_of_layers(kind: dict[str, bool]) -> None:
    assert sum(run(seed, kind).num_splits for seed in range(2)) > 20


def test_cuts_among_drafts() -> None:
    num_splits = 0
    for seed in range(2):
        world = World(seed, OPTIONS, EVENTS | {"drafts"}, is_split=True)
        world.run()
        num_splits += world.num_splits
    assert num_splits > 20


def test_encoders() -> None:
    for seed in range(2):
        world = World(seed, {"cascade": "never"}, EVENTS | {"graphs"}, is_split=True, is_encoder=True)
        world.run()
        assert world.num_vectors


def test_a_cut_that_asks_the_device_for_lengths_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = micro_batches.split_batch

    def faulty(common: CommonAttentionMetadata, at: int, refusal: str = "") -> Any:
        halves = right(common, at, refusal)
        halves[0].attention.seq_lens_cpu_upper_bound[:] = common.seq_lens[halves[0].requests].cpu().numpy()
        return halves

    monkeypatch.setattr(micro_batches, "split_batch", faulty)
    with pytest.raises(HostSyncError):
        run(0, {})
