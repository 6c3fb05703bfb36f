"""Attention that plans on the host: its steps are launched alone, and what it is told of lengths is the truth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
from torch import Tensor

from slipstream.attention.backend import AttentionLayer
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.config import EngineConfig
from slipstream.device.operation import operation
from slipstream.device.sim import SimDevice
from slipstream.scheduler.scheduler import Scheduler
from tests.sim.hash_model import HashBackend
from tests.sim.world import World

Exact = Literal["never", "prefill", "always"]
SEEDS = range(30, 33)


@operation(like="q")
def check_lengths(q: Tensor, query_lens: Tensor, seq_lens: Tensor, computed: tuple[int, ...]) -> Tensor:
    for i, known in enumerate(computed):
        alive, length = int(query_lens[i]), int(seq_lens[i])
        if alive and length != known + alive:
            raise ValueError(f"{known} computed tokens and {alive} new ones are not {length}")
    return q.clone()


class PlanningBackend(HashBackend):
    """Takes the host's word for lengths, where it gets one."""

    def __init__(self) -> None:
        self.num_told = 0

    def build(self, common: CommonAttentionMetadata) -> Any:
        known = common.num_computed_cpu
        return common, None if known is None else tuple(known.tolist())

    def starting_at(self, metadata: Any, seq_starts: Tensor) -> Any:
        return replace(metadata[0], seq_starts=seq_starts), metadata[1]

    def run(self, layer: AttentionLayer, q: Tensor, kv_cache: Tensor, metadata: Any) -> Tensor:
        common, computed = metadata
        if computed is not None and common.num_reqs:
            self.num_told += 1
            q = check_lengths(q, common.query_lens, common.seq_lens, computed)
        return super().run(layer, q, kv_cache, common)


class ExactWorld(World):
    exact: Exact = "always"

    def resolve(self) -> EngineConfig:
        config = super().resolve()
        return replace(config, scheduler=replace(config.scheduler, exact_lengths=self.exact))


def run(seed: int, exact: Exact, **overrides: Any) -> tuple[ExactWorld, PlanningBackend]:
    made: list[PlanningBackend] = []

    def make(_config: EngineConfig, _device: SimDevice) -> PlanningBackend:
        made.append(PlanningBackend())
        return made[-1]

    world = ExactWorld(seed, {"cudagraph_mode": "none", "steps_in_flight": 3, **overrides}, make_backend=make)
    world.exact = exact
    world.run()
    return world, made[0]


@pytest.mark.parametrize("exact", ["prefill", "always"])
def test_what_the_host_says_of_lengths_is_true_and_every_token_right(exact: Exact) -> None:
    for seed in SEEDS:
        world, backend = run(seed, exact)
        assert backend.num_told > 0
        assert world.core.stats.num_drains > 0


def test_exact_lengths_are_not_given_while_bounds_suffice() -> None:
    _, backend = run(SEEDS[0], "never")
    assert backend.num_told == 0


def test_a_step_that_runs_ahead_of_others_does_not_know_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that the drain is there for."""
    monkeypatch.setattr(Scheduler, "_must_drain", lambda _self: False)
    found = []
    for seed in SEEDS:
        try:
            run(seed, "always")
        except Exception as error:
            found.append(type(error).__name__)
    assert len(found) == len(SEEDS), "no step may be launched so"
