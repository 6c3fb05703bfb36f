from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream.attention.backend import Caps
from slipstream.device.operation import Operation
from slipstream.device.sim import SimDevice
from slipstream.engine.core import EngineCore
from slipstream.graphs.mode import CUDAGraphMode, usable_mode
from tests.engine.drive import make_request
from tests.sim.world import World

M = CUDAGraphMode


@pytest.mark.parametrize(
    ("support", "mode", "usable"),
    [
        ("always", M.FULL, M.FULL),
        ("always", M.FULL_AND_PIECEWISE, M.FULL_AND_PIECEWISE),
        ("decode", M.FULL, M.FULL_AND_PIECEWISE),
        ("decode", M.FULL_DECODE_ONLY, M.FULL_DECODE_ONLY),
        ("never", M.FULL, M.PIECEWISE),
        ("never", M.FULL_DECODE_ONLY, M.NONE),
        ("never", M.FULL_AND_PIECEWISE, M.PIECEWISE),
        ("never", M.PIECEWISE, M.PIECEWISE),
        ("never", M.NONE, M.NONE),
    ],
)
def test_no_more_is_recorded_than_the_backend_allows(support: str, mode: M, usable: M) -> None:
    caps = Caps(dtypes=("float32",), host_lengths="none", graph_support=support)  # type: ignore[arg-type]
    assert usable_mode(mode, caps) is usable


def test_a_decode_step_in_a_graph_is_few_launches() -> None:
    """Staging, one replay, the way out: nothing that grows with the model."""
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "cudagraph_capture_sizes": (1, 2, 4, 8, 16, 32, 48)}
    events = frozenset({"graphs", "stop_ids", "noise"})  # nothing that samples outside of the graph
    launches = {}
    for mode in ("none", "full"):
        world = World(3, {"cudagraph_mode": mode, "steps_in_flight": 2, **settings}, events)
        world.run()
        runner = world.core.runner
        num_poisoned = len(runner.buffers.step_buffers()) + 1
        launches[mode] = world.num_launched / world.num_steps - num_poisoned
    assert launches["full"] <= 5, "copy in, scatter, replay, copy to a slot, copy out"
    assert launches["none"] > 14


@pytest.mark.parametrize("aborted", [False, True])
def test_recording_when_idle_does_not_run_the_last_step_again(aborted: bool) -> None:
    """The last step may have had more tokens than the graph, and a row that was ended from outside believes it runs."""
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "max_model_len": 64, "num_gpu_blocks_override": 64}
    world = World(1, {"cudagraph_mode": "full", **sizes})
    world.device = SimDevice(1)
    core = world._build(world.resolve())
    core.add(make_request("r", range(1, 40), 1 if not aborted else 9))
    core.step()
    core.finish("r")
    while core.has_work:
        core.step()
    before = world.device.peek(core.runner.rows.num_computed).clone()
    while core.use_idle_time():
        pass
    assert torch.equal(world.device.peek(core.runner.rows.num_computed), before)


def core_with_all_graphs() -> EngineCore:
    """Whose n-gram drafts adapt."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": True}
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "max_model_len": 64, "num_gpu_blocks_override": 64}
    world = World(4, {"cudagraph_mode": "full", "speculative_config": drafts, **sizes})
    world.device = SimDevice(1)
    core = world._build(world.resolve())
    while core.use_idle_time():
        pass
    return core


def test_what_follows_a_targets_own_graph_has_run_when_that_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled when they first run: a change of the draft length must not wait for that."""
    drawn: set[bool] = set()
    call = Operation.__call__

    def watched(self: Operation[Any, Any], *args: Any, **kwargs: Any) -> Any:
        if self.name == "draw_tokens":
            drawn.add(self.signature.bind(*args, **kwargs).arguments["noise"])
        return call(self, *args, **kwargs)

    monkeypatch.setattr(Operation, "__call__", watched)
    core_with_all_graphs()
    assert False in drawn, "greedy: whole steps draw with noise"


def test_the_cost_of_a_step_is_that_of_the_drafts_it_checks() -> None:
    """A step with n-gram drafts proposes all there may be: every length has a graph and a cost of its own."""
    core = core_with_all_graphs()
    seen: set[tuple[int, int]] = set()
    timer = core.runner.idle_work.timer
    assert timer is not None
    timer.on_cost = lambda num_reqs, num_drafts, seconds: seen.add((num_reqs, num_drafts))
    for desc in core.runner.graphs.recorded:
        timer.time_graph(desc)
    assert seen == {(4, k) for k in (0, 1, 2, 3)}
