"""A prepared batch is reused while its composition comes again, and no longer than it is valid."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from slipstream.device.sim import SimDevice
from slipstream.engine.core import EngineCore
from slipstream.graphs.mode import CUDAGraphMode
from slipstream.plan import Composition, StepPlan
from slipstream.runner.batch import PreparedBatch
from tests.engine.drive import make_request
from tests.sim.world import World


def make_core(**options: Any) -> EngineCore:
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "max_model_len": 64, "num_gpu_blocks_override": 64}
    steps = {"steps_in_flight": 1, "long_prefill_token_threshold": 48, "speculative_config": None}
    world = World(3, {"block_size": 16, **steps, **sizes, **options}, frozenset())
    world.device = SimDevice(1)
    return world._build(world.resolve())


class Seen:
    """The plans that were launched, and the batches they ran as."""

    def __init__(self, core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[PreparedBatch] = []
        self.bounds: list[list[int]] = []
        self.plans: list[StepPlan] = []
        self.num_flushed: list[int] = []
        runner = core.runner
        prepare, flush = runner.batches.prepare, runner.rows.flush

        def watched(plan: StepPlan) -> PreparedBatch:
            self.plans.append(plan)
            self.batches.append(prepare(plan))
            self.bounds.append(self.batches[-1].inputs.attention.seq_lens_cpu_upper_bound.tolist())
            return self.batches[-1]

        def watched_flush() -> int:
            self.num_flushed.append(flush())
            return self.num_flushed[-1]

        monkeypatch.setattr(runner.batches, "prepare", watched)
        monkeypatch.setattr(runner.rows, "flush", watched_flush)


def finish_all(core: EngineCore) -> None:
    while core.has_work:
        core.step()


def test_steps_of_one_composition_share_a_batch_that_is_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(cudagraph_mode="none")
    seen = Seen(core, monkeypatch)
    core.add(make_request("a", [5, 6, 7], 12, ignore_eos=True))
    finish_all(core)
    decodes = seen.batches[1:]
    assert len(decodes) == 11 and len({id(batch) for batch in decodes}) == 1
    assert seen.batches[0] is not decodes[0]
    # The prompt's step sends the row; the first decode sends what has changed of the composition, later ones nothing.
    assert seen.num_flushed[0] > seen.num_flushed[1] > 0 and not any(seen.num_flushed[2:])
    # Lengths are each step's own: the row's tokens before it, and the new one.
    assert seen.bounds == [[3 + i] for i in range(12)]
    for plan, bound in zip(seen.plans, seen.bounds, strict=True):
        assert bound == (plan.num_computed_bounds + plan.composition.num_tokens).tolist()


def test_another_request_in_the_row_has_a_batch_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same id, row and lengths, but another admission and other requirements."""
    core = make_core(cudagraph_mode="none")
    seen = Seen(core, monkeypatch)
    found = []
    for temperature in (0.0, 1.0):
        core.add(make_request("a", [5, 6, 7], 6, temperature=temperature, seed=1, ignore_eos=True))
        finish_all(core)
        found.append((seen.batches[-1].composition, seen.batches[-1].work.requirements.sampling))  # type: ignore[attr-defined]
    (greedy, needs), (noisy, others) = found
    assert (greedy.request_ids, greedy.rows, greedy.num_tokens) == (noisy.request_ids, noisy.rows, noisy.num_tokens)
    assert greedy.generations != noisy.generations
    assert not needs.noise and others.noise


def test_an_equal_composition_that_is_another_object_is_prepared_anew() -> None:
    """Identity is the rule: a host that compared compositions would read all of a batch in every step."""
    core = make_core(cudagraph_mode="none")
    core.add(make_request("a", [5, 6, 7], 12, ignore_eos=True))
    for _ in range(3):
        core.step()
    batches = core.runner.batches
    first = batches._on_device
    assert first is not None
    fields = {name: getattr(first.composition, name) for name in Composition.__dataclass_fields__}
    plan = StepPlan(99, Composition(**fields), np.array([6], dtype=np.int32))
    assert plan.composition == first.composition
    assert batches.prepare(plan) is not first
    again = StepPlan(100, first.composition, np.array([7], dtype=np.int32))
    assert batches.prepare(again) is first and again.composition is first.composition


def test_a_graph_that_was_recorded_meanwhile_serves_the_same_composition() -> None:
    core = make_core(cudagraph_mode="full", cudagraph_capture_sizes=(1, 2, 3, 4, 16, 48))
    runner = core.runner
    rows = (0, 1, 2)
    composition = Composition(("a", "b", "c"), (1, 2, 3), rows, (1, 1, 1), (True,) * 3, (0, 0, 0), 3)
    plan = StepPlan(0, composition, np.array([4, 4, 4], dtype=np.int32))

    def prepared() -> PreparedBatch:
        with runner.device.use_stream(runner.device.compute_stream):
            return runner.batches.prepare(plan)

    before = prepared()
    assert prepared() is before
    assert before.graph.desc.mode is CUDAGraphMode.FULL and before.graph.desc.num_reqs == 4
    while core.use_idle_time():
        pass
    after = prepared()
    assert after is not before and after.graph.desc.num_reqs == 3
    assert after.graph.recorded is runner.graphs.recorded[after.graph.desc]


def test_only_a_few_batches_are_kept() -> None:
    core = make_core(cudagraph_mode="none")
    batches, plans = core.runner.batches, []
    with core.runner.device.use_stream(core.runner.device.compute_stream):
        for i in range(9):
            composition = Composition(("a",), (i,), (0,), (1,), (True,), (0,), 1)
            plans.append(StepPlan(i, composition, np.array([4], dtype=np.int32)))
        first = [batches.prepare(plan) for plan in plans]
        assert [batches.prepare(plan) is batch for plan, batch in zip(plans[1:], first[1:], strict=True)] == [True] * 8
        assert batches.prepare(plans[0]) is not first[0], "the oldest made room"
        assert len(batches._kept) == 8
