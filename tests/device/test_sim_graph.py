from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.device.interface import Graph, GraphPool
from slipstream.device.operation import operation, spec_of
from slipstream.device.sim import CaptureError, RaceError, SimDevice, StaleReadError
from tests.device.sim_setup import SEEDS, event_on, marked, order, pinned, upload


@pytest.fixture
def device() -> SimDevice:
    return SimDevice(3)


def record(device: SimDevice, run: Callable[..., Any], *args: Any, pool: GraphPool | None = None) -> tuple[Graph, Any]:
    """A graph, and what the recorded run returned."""
    with device.record(pool or device.graph_pool()) as capture:
        result = run(*args)
    assert capture.graph is not None
    return capture.graph, result


_num_runs = [0]


@operation(lambda x: spec_of(x))
def counted_in_graph(x: Tensor) -> Tensor:
    _num_runs[0] += 1
    return x + 1


def test_a_recording_does_not_run(device: SimDevice) -> None:
    x = torch.zeros(4, device="sim")
    _num_runs[0] = 0
    before = device.num_launched
    graph, _y = record(device, lambda: (x.add_(1), counted_in_graph(x)))
    device.drain()
    assert _num_runs == [0]
    assert device.num_launched == before
    assert device.peek(x).tolist() == [0.0] * 4
    graph.replay()
    assert device.num_launched == before + 1, "a replay is one launch"
    assert device.peek(x).tolist() == [1.0] * 4
    assert _num_runs == [1]


def test_replays_run_on_the_recorded_memory() -> None:
    for seed in SEEDS:
        device = SimDevice(seed)
        x = torch.zeros(4, device="sim")
        graph, y = record(device, lambda x: (x * 2 + 1).cumsum(0), x)
        for i in range(4):
            x.fill_(i)
            graph.replay()
            expected = (torch.full((4,), float(i)) * 2 + 1).cumsum(0)
            assert device.peek(y + 0).tolist() == expected.tolist()


def test_two_replays_in_a_row_are_two_runs() -> None:
    for seed in SEEDS:
        device = SimDevice(seed)
        x = torch.ones(4, device="sim")
        graph, _ = record(device, lambda x: x.mul_(3).add_(1), x)
        graph.replay()
        graph.replay()
        assert device.peek(x).tolist() == [13.0] * 4


def test_host_numbers_are_frozen_in_the_recording(device: SimDevice) -> None:
    x, scale, number = torch.ones(3, device="sim"), 2.0, torch.tensor(10.0)
    graph, y = record(device, lambda: x * scale + number)
    scale = 5.0
    number.fill_(50.0)
    graph.replay()
    assert device.peek(y).tolist() == [12.0] * 3


def test_views_of_a_result_follow_the_replays(device: SimDevice) -> None:
    x = torch.zeros(2, 3, device="sim")
    graph, y = record(device, lambda: x + 1)
    part = y.t()[1]
    for i in range(3):
        x.fill_(i)
        graph.replay()
        assert device.peek(part * 1).tolist() == [i + 1.0, i + 1.0]


@pytest.mark.parametrize("read", [lambda y: y + 1, lambda y: y.tolist(), lambda y: y[1:].clone()])
def test_results_hold_nothing_before_the_first_replay(device: SimDevice, read: Callable[[Tensor], Any]) -> None:
    x = torch.zeros(4, device="sim")
    graph, y = record(device, lambda: x + 1)
    with device.sync_guard.allow("collect"):
        with pytest.raises(StaleReadError, match="recorded but not yet replayed"):
            read(y)
        graph.replay()
        read(y)


FORBIDDEN: dict[str, Callable[[SimDevice, Tensor], Any]] = {
    "item": lambda device, x: x[0].item(),
    "tolist": lambda device, x: x.tolist(),
    "numpy": lambda device, x: x.numpy(),
    "cpu": lambda device, x: x.cpu(),
    "if": lambda device, x: 1 if x.sum() > 0 else 0,
    "nonzero": lambda device, x: x.nonzero(),
    "mask index": lambda device, x: x[x > 0],
    "mask assignment of a tensor": lambda device, x: x.__setitem__(x > 0, x[:1].expand(4).clone()),
    "copy to the host": lambda device, x: torch.zeros(4).copy_(x),
    "host number from the device": lambda device, x: torch.tensor([x[0]]),
    "copy from pageable memory": lambda device, x: x.copy_(torch.ones(4)),
    "tensor from a list": lambda device, x: torch.tensor([1.0], device="sim"),
    "host tensor index": lambda device, x: x[torch.tensor([0, 1])],
    "pinned_empty": lambda device, x: device.pinned_empty((2,), torch.float32),
    "poison": lambda device, x: device.poison(x),
    "event record": lambda device, x: device.event().record(device.compute_stream),
    "event query": lambda device, x: device.event().query(),
    "event synchronize": lambda device, x: device.event().synchronize(),
    "event wait": lambda device, x: device.compute_stream.wait_event(device.event()),
    "recording": lambda device, x: device.record(device.graph_pool()).__enter__(),
    "warm-up": lambda device, x: device.warm_up().__enter__(),
    "work of another stream": lambda device, x: _on_copy_stream(device, x),
}


def _on_copy_stream(device: SimDevice, x: Tensor) -> None:
    with device.use_stream(device.copy_stream):
        x.add_(1)


@pytest.mark.parametrize("may_wait", [False, True], ids=["", "waiting allowed"])
@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_a_recording_cannot_hold_is_an_error(device: SimDevice, name: str, may_wait: bool) -> None:
    x = torch.zeros(4, device="sim")
    guard = device.sync_guard.allow("capture") if may_wait else device.sync_guard.forbid()
    with guard, pytest.raises(CaptureError, match=r"test_sim_graph\.py:\d+"), device.record(device.graph_pool()):
        FORBIDDEN[name](device, x)
    assert device.recording is None
    assert device.peek(x + 1).tolist() == [1.0] * 4, "the device works as before"


def test_a_graph_is_not_replayed_inside_a_recording(device: SimDevice) -> None:
    x = torch.zeros(4, device="sim")
    graph, _ = record(device, lambda: x.add_(1))
    with pytest.raises(CaptureError, match="replay"):
        record(device, graph.replay)


def _use(x: Tensor) -> Tensor:
    return x + 1  # the use


def test_memory_of_the_warm_up_is_not_recorded(device: SimDevice) -> None:
    with device.sync_guard.allow("capture"), device.warm_up():
        lazy = torch.zeros(4, device="sim")
    for run in (lambda: _use(lazy), lambda: lazy.add_(1), lambda: lazy[1:].clone()):
        with pytest.raises(CaptureError, match="the warm-up allocated"):
            record(device, run)
    with pytest.raises(CaptureError, match=marked(_use, "the use")):
        record(device, lambda: _use(lazy))
    assert device.peek(lazy + 1).tolist() == [1.0] * 4, "outside of recordings it is memory like any other"


def test_what_the_warm_up_wrote_to_may_be_recorded(device: SimDevice) -> None:
    x = torch.zeros(4, device="sim")
    with device.sync_guard.allow("capture"), device.warm_up():
        x.add_(1)
        (x + 1).mul_(2)
    graph, y = record(device, lambda: x + 1)
    graph.replay()
    assert device.peek(y).tolist() == [2.0] * 4


@pytest.mark.parametrize("use", [lambda x: x + 1, lambda x: x.fill_(3.0)], ids=["read", "write"])
@pytest.mark.parametrize("reused", [False, True])
def test_a_replay_after_memory_was_freed_is_an_error(
    device: SimDevice, use: Callable[[Tensor], Tensor], reused: bool
) -> None:
    x = torch.zeros(64, device="sim")
    graph, _ = record(device, use, x)
    graph.replay()
    del x, _
    other = torch.zeros(64, device="sim") if reused else None
    with pytest.raises(CaptureError, match="freed after the recording"):
        graph.replay()
    assert other is None or device.peek(other).unique().tolist() == [0.0]


def test_memory_freed_while_it_was_recorded_is_an_error_too(device: SimDevice) -> None:
    x = [torch.zeros(64, device="sim")]
    graph, _ = record(device, lambda: x.pop() + 1)
    with pytest.raises(CaptureError, match="freed after the recording"):
        graph.replay()


def test_an_input_that_this_step_did_not_write_is_stale(device: SimDevice) -> None:
    x = torch.zeros(8, device="sim")
    graph, y = record(device, lambda: _use(x))
    device.poison(x)
    x[:4].fill_(1)
    with pytest.raises(StaleReadError, match=marked(_use, "the use")):
        graph.replay()
    x[4:].fill_(2)
    graph.replay()
    assert device.peek(y).tolist() == [2.0] * 4 + [3.0] * 4


def test_only_what_a_graph_does_not_write_itself_is_an_input(device: SimDevice) -> None:
    x = torch.zeros(8, device="sim")
    graph, y = record(device, lambda: (x[:2].fill_(1), x[2:4].fill_(2), x + 1)[2])
    device.poison(x)
    with pytest.raises(StaleReadError, match="bytes 16 to 32"):
        graph.replay()
    x[4:].fill_(3)
    graph.replay()
    assert device.peek(y).tolist() == [2.0] * 2 + [3.0] * 2 + [4.0] * 4


def test_memory_of_the_recording_may_be_written_in_parts(device: SimDevice) -> None:
    x = torch.ones(4, device="sim")

    def run() -> Tensor:
        whole = torch.empty(8, device="sim")
        whole[:4] = x
        whole[4:] = x + 1
        return whole * 2

    graph, y = record(device, run)
    graph.replay()
    assert device.peek(y).tolist() == [2.0] * 4 + [4.0] * 4


def test_unwritten_memory_of_a_recording_cannot_be_read(device: SimDevice) -> None:
    x = torch.ones(16, device="sim")

    def run() -> Tensor:
        temporary = x + 1
        del temporary
        fresh = torch.empty(16, device="sim")  # the memory of the temporary
        return fresh * 2

    with pytest.raises(StaleReadError, match="never written"):
        record(device, run)


def _overwrite_during_copy(device: SimDevice, has_own_buffer: bool) -> tuple[Tensor, Tensor]:
    """Two steps as a graph; their results go to the host on the copy stream."""
    x = torch.zeros(16, device="sim")
    graph, y = record(device, lambda: x.add_(1) * 1)
    buffers = [torch.zeros(16, device="sim") for _ in range(2)]
    targets = [device.pinned_empty((16,), torch.float32) for _ in range(2)]
    for buffer, target in zip(buffers, targets, strict=True):
        graph.replay()  # the overwrite
        if has_own_buffer:
            buffer.copy_(y)
        order(device, device.compute_stream, device.copy_stream)
        with device.use_stream(device.copy_stream):
            device.copy_async(target, buffer if has_own_buffer else y)  # the copy
    order(device, device.copy_stream, device.compute_stream)  # memory is freed at the end
    return targets[0], targets[1]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_static_output_overwritten_during_its_copy_is_a_race(seed: int) -> None:
    with pytest.raises(RaceError) as caught:
        _overwrite_during_copy(SimDevice(seed), has_own_buffer=False)
    for mark in ("the overwrite", "the copy"):
        assert marked(_overwrite_during_copy, mark) in str(caught.value)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_output_copied_in_stream_order_first_is_fine(seed: int) -> None:
    device = SimDevice(seed)
    first, second = _overwrite_during_copy(device, has_own_buffer=True)
    event = event_on(device, device.copy_stream)
    with device.sync_guard.allow("collect"):
        event.synchronize()
    assert first.tolist() == [1.0] * 16
    assert second.tolist() == [2.0] * 16


def _layers(x: Tensor, weight: Tensor, num_layers: int) -> Tensor:
    for _ in range(num_layers):
        x = torch.relu(x @ weight) + x
    return x


def test_graphs_of_one_pool_replayed_in_turn_give_what_eager_runs_give() -> None:
    weight_cpu = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    for seed in range(12):
        device = SimDevice(seed)
        weight, pool = upload(device, weight_cpu), device.graph_pool()
        x = torch.zeros(8, 4, device="sim")
        sizes = (8, 5, 3, 1)
        graphs = {size: record(device, _layers, x[:size], weight, 4, pool=pool) for size in sizes}
        for i, size in enumerate((1, 8, 3, 3, 5, 8, 1)):
            x.fill_(i - 2.5)
            graph, y = graphs[size]
            graph.replay()
            result = y.clone()
            torch.full((size, 4), 99.0, device="sim")  # memory beside the pool comes and goes
            assert torch.equal(device.peek(result), _layers(torch.full((size, 4), i - 2.5), weight_cpu, 4))


def test_graphs_of_one_pool_share_memory(device: SimDevice) -> None:
    x, pool, blocks = torch.zeros(64, device="sim"), device.graph_pool(), []

    def first() -> Tensor:
        temporary = x + 1
        blocks.append(temporary.handle.block)
        return temporary * 2

    _, y = record(device, first, pool=pool)
    _, z = record(device, lambda: x + 5, pool=pool)
    assert z.handle.block is blocks[0]
    assert y.handle.block is not z.handle.block, "the memory of a result in use is not shared"
    _, other = record(device, lambda: x + 5)
    assert other.handle.block not in (*blocks, y.handle.block), "another pool is other memory"


def test_a_piece_may_read_the_results_of_an_earlier_one_and_let_go_of_them() -> None:
    """As a pass in pieces does with its residual."""
    for seed in range(12):
        device = SimDevice(seed)
        x, pool = torch.ones(16, device="sim"), device.graph_pool()
        first, residual = record(device, lambda x: [x + 1], x, pool=pool)
        second, y = record(device, lambda residual: residual.pop() * 2, residual, pool=pool)
        third, z = record(device, lambda x, y: y + x * 10, x, y, pool=pool)
        for i in range(3):
            x.fill_(i)
            for graph in (first, second, third):
                graph.replay()
            assert device.peek(z + 0).tolist() == [2.0 * (i + 1) + 10.0 * i] * 16


def test_a_result_that_another_graph_of_the_pool_overwrote_is_stale(device: SimDevice) -> None:
    x, pool = torch.zeros(16, device="sim"), device.graph_pool()
    first, y = record(device, lambda: (x + 1) * 2, pool=pool)
    second, z = record(device, lambda: x + 5, pool=pool)  # in the memory of the temporary
    second.replay()
    first.replay()
    assert device.peek(y + 0).tolist() == [2.0] * 16
    with pytest.raises(StaleReadError, match="another graph of the same pool"):
        z + 0
    second.replay()
    assert device.peek(z + 0).tolist() == [5.0] * 16


def test_copies_from_pinned_memory_read_it_at_every_replay(device: SimDevice) -> None:
    source, x = pinned(device, [1.0, 2.0]), torch.zeros(2, device="sim")
    graph, _ = record(device, lambda: device.copy_async(x, source))
    graph.replay()
    with pytest.raises(RaceError):
        source.fill_(3.0)
    device.drain()
    source.fill_(3.0)
    graph.replay()
    assert device.peek(x).tolist() == [3.0, 3.0]


def test_copies_to_pinned_memory_are_ordered_like_any(device: SimDevice) -> None:
    x, target = torch.zeros(2, device="sim"), pinned(device, [7.0, 7.0])
    graph, _ = record(device, lambda: device.copy_async(target, x.add_(1)))
    assert target.tolist() == [7.0, 7.0], "nothing has run"
    graph.replay()
    with pytest.raises(RaceError):
        target.tolist()
    device.drain()
    assert target.tolist() == [1.0, 1.0]


def test_a_recording_of_nothing(device: SimDevice) -> None:
    graph, _ = record(device, lambda: None)
    graph.replay()
    device.drain()


def test_a_failed_recording_leaves_the_device_usable(device: SimDevice) -> None:
    x, pool = torch.zeros(4, device="sim"), device.graph_pool()
    with pytest.raises(ZeroDivisionError), device.record(pool) as capture:
        x.add_(1 / 0)
    assert capture.graph is None
    graph, y = record(device, lambda: x + 1, pool=pool)
    graph.replay()
    assert device.peek(y).tolist() == [1.0] * 4


def test_replays_run_on_the_stream_that_is_current_then(device: SimDevice) -> None:
    x = torch.zeros(4, device="sim")
    graph, _ = record(device, lambda: x.add_(1))
    with device.use_stream(device.copy_stream), pytest.raises(RaceError):
        graph.replay()
    order(device, device.compute_stream, device.copy_stream)
    with device.use_stream(device.copy_stream):
        graph.replay()
    with pytest.raises(RaceError):
        x.clone()
    assert device.peek(x).tolist() == [1.0] * 4
