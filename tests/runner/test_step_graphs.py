from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from slipstream.attention.backend import Caps
from slipstream.device.operation import Operation
from slipstream.device.sim import SimDevice
from slipstream.engine.core import EngineCore
from slipstream.graphs.descriptor import BatchExecutionDescriptor
from slipstream.graphs.mode import CUDAGraphMode, usable_mode
from slipstream.runner.step_graphs import DraftSizes
from tests.engine.drive import make_request
from tests.sim.world import World

M = CUDAGraphMode


def as_many(num_checked: int) -> int:
    return num_checked


def all_of(most: int) -> Callable[[int], int]:
    """Who makes drafts makes all, however many are checked."""
    return lambda num_checked: most if num_checked else 0


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
        num_poisoned = len(runner.buffers.of_a_step()) + 1
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


@pytest.mark.parametrize(
    ("lengths", "initial", "makes_most", "mixed"),
    [
        ((0,), 0, False, [0]),
        ((3,), 3, False, [3]),
        ((0, 1, 2, 3, 5), 3, False, [0, 3]),
        ((0, 1), 1, False, [0, 1]),
        ((0, 1, 2, 3, 5), 3, True, [0, 5]),
    ],
)
def test_mixed_batches_have_graphs_for_the_drafts_that_are_made_behind_them(
    lengths: tuple[int, ...], initial: int, makes_most: bool, mixed: list[int]
) -> None:
    sizes = DraftSizes(lengths, initial, num_made=all_of(max(lengths)) if makes_most else as_many)
    found = [kind for kind in sizes.kinds() if kind.query_len is None and kind.tier == "fast"]
    assert [kind.num_drafts for kind in found] == mixed
    # Only those with as many as the first steps make are there before the first step.
    urgent = {k: sizes.order(BatchExecutionDescriptor(M.FULL, 64, 8, None, "fast", k), 8) for k in mixed}
    assert [k for k, place in urgent.items() if place == 0] == mixed[-1:]


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


@pytest.mark.parametrize("foresees", [False, True])
def test_a_step_behind_a_trial_has_a_graph_where_it_checks_the_draft(foresees: bool) -> None:
    fast = [kind for kind in DraftSizes((0, 1, 2), 2, foresees).kinds() if kind.tier == "fast"]
    kinds = {(kind.query_len, kind.num_drafts) for kind in fast}
    assert {(1, 0), (2, 1), (3, 2), (1, 1), (2, 2), (3, 1)} <= kinds
    assert ((2, 0) in kinds) is not foresees


def test_where_as_many_drafts_are_made_as_there_may_be_every_change_has_a_graph() -> None:
    """No draft is checked that was not made, and whoever goes from one number to another runs whole steps."""
    lengths = (0, 1, 2, 5)
    sizes = DraftSizes(lengths, 2, True, all_of(5))
    kinds = {(kind.query_len, kind.num_drafts) for kind in sizes.kinds() if kind.tier == "fast"}
    assert kinds == {(1, 0), (1, 5), (2, 5), (3, 5), (6, 5), (None, 0), (None, 5)}
    for before, after in itertools.permutations(lengths, 2):
        steps = [(before, sizes.num_made(before)), (before, sizes.num_made(after)), (after, sizes.num_made(after))]
        if not after:
            steps.pop(1)  # what is made is left unchecked
        assert {(1 + checked, made) for checked, made in steps} <= kinds


def test_a_step_is_priced_by_the_drafts_it_checks() -> None:
    """N-gram drafts are always made as far as they go: every length has a graph, a price, and it is its own."""
    core = core_with_all_graphs()
    seen: set[tuple[int, int]] = set()
    graphs = core.runner.graphs
    graphs._on_cost = lambda num_reqs, num_drafts, seconds: seen.add((num_reqs, num_drafts))
    for desc in graphs._hidden:
        graphs._measure(desc)
    assert seen == {(4, k) for k in (0, 1, 2, 3)}


def orders_of(sizes: DraftSizes, size: int) -> dict[tuple[int, int], int | None]:
    found = {}
    for query_len, tier, made in sizes.kinds():
        if query_len is not None and tier == "fast":
            shape = (size * query_len, size, query_len, tier, made)
            found[query_len - 1, made] = sizes.order(BatchExecutionDescriptor(CUDAGraphMode.FULL, *shape), 256)
    return found


@pytest.mark.parametrize("makes_most", [False, True])
def test_every_graph_that_is_recorded_has_the_steps_before_and_behind_it(makes_most: bool) -> None:
    """A length without a graph for its steps has no price and is never chosen."""
    sizes = DraftSizes((0, 1, 2, 3, 5, 7), 5, True, all_of(7) if makes_most else as_many)
    powers = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    recorded = {(size, *key) for size in powers for key, o in orders_of(sizes, size).items() if o is not None}
    for size, checked, made in recorded:
        assert (size, checked, sizes.num_made(checked)) in recorded
        assert makes_most or (size, made, made) in recorded
    if makes_most:
        assert {(64, 7, 7), (64, 5, 7), (128, 3, 7), (256, 0, 7), (256, 5, 7), (256, 1, 7)} <= recorded
        assert not {(128, 7, 7), (256, 2, 7), (256, 3, 7)} & recorded
        assert orders_of(sizes, 8) == {(5, 7): 0, (0, 0): 1, (0, 7): 1, (1, 7): 2, (2, 7): 2, (3, 7): 2, (7, 7): 2}
        assert orders_of(sizes, 24)[0, 7] == 4 and orders_of(sizes, 24)[7, 7] is None
        return
    assert {(64, 0, 1), (64, 5, 7), (256, 0, 1)} <= recorded
    assert not {(128, 5, 7), (256, 1, 2), (256, 3, 5)} & recorded
    # The lengths themselves come before the steps between them, but for the shortest, which trials want.
    of_eight = orders_of(sizes, 8)
    assert of_eight[5, 5] == 0 and of_eight[0, 0] == of_eight[0, 1] == 1 and of_eight[7, 7] == 2
    assert of_eight[1, 2] == of_eight[5, 7] == of_eight[7, 5] == 3
    assert orders_of(sizes, 24)[0, 1] == 4 and orders_of(sizes, 24)[1, 2] is None
