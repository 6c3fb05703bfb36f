from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation, spec_of
from slipstream.device.sim import DeviceFaultError, RaceError, SimDevice, SimTensor, StaleReadError
from slipstream.device.sync_guard import HostSyncError
from tests.device.sim_setup import SEEDS, marked, order, pinned, upload


@pytest.fixture
def device() -> SimDevice:
    return SimDevice(3)


@operation(lambda x, scale=1.0: (spec_of(x), TensorSpec((x.shape[0],), torch.int64)))
def sim_scale_and_choose(x: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    assert type(x) is Tensor, "the body sees plain memory"
    values = x.numpy() * scale  # whatever a body does, the host never waits for it
    return torch.from_numpy(values).to(x.dtype), x.argmax(1)


@operation(writes=("target",))
def sim_store(source: Tensor, target: Tensor, offset: int) -> None:
    target[offset : offset + source.shape[0]] = source


@operation(lambda parts, target: spec_of(target), writes=("parts",))
def sim_clear_all(parts: Tensor, target: Tensor) -> Tensor:
    parts.zero_()
    return target + 1


@operation(lambda x, others: spec_of(x))
def sim_sum_of(x: Tensor, others: list[Tensor]) -> Tensor:
    return x + sum(others)


@operation(lambda x: TensorSpec((3,), torch.float32))
def sim_wrong_shape(x: Tensor) -> Tensor:
    return x


@operation(lambda x: TensorSpec((4,), torch.int32))
def sim_wrong_type(x: Tensor) -> Tensor:
    return x


@operation(lambda x: (spec_of(x), spec_of(x)))
def sim_one_too_few(x: Tensor) -> tuple[Tensor, ...]:
    return (x,)


@operation(lambda x: spec_of(x))
def sim_returns_nothing(x: Tensor) -> None:
    return None


@operation(lambda x: spec_of(x))
def sim_fails(x: Tensor) -> Tensor:
    raise IndexError("no such page")


def test_one_operation_is_queued_and_its_outputs_have_shapes_at_once() -> None:
    num_lagging = 0
    for seed in SEEDS:
        device = SimDevice(seed)
        x_cpu = torch.randn(3, 4)
        x = upload(device, x_cpu)
        before = device.num_launched
        values, choice = sim_scale_and_choose(x, scale=2.0)
        assert device.num_launched == before + 1
        num_lagging += len(device.streams[0].queue) > 0
        assert isinstance(values, SimTensor)
        assert (values.shape, values.dtype) == ((3, 4), torch.float32)
        assert (choice.shape, choice.dtype) == ((3,), torch.int64)
        assert torch.equal(device.peek(values), x_cpu * 2)
        assert torch.equal(device.peek(choice), x_cpu.argmax(1))
    assert num_lagging > 10


def test_arguments_may_be_left_to_their_defaults_or_named(device: SimDevice) -> None:
    x_cpu = torch.randn(3, 4)
    x = upload(device, x_cpu)
    for values, _ in (sim_scale_and_choose(x), sim_scale_and_choose(x, 1.0), sim_scale_and_choose(x, scale=1.0)):
        assert torch.equal(device.peek(values), x_cpu)


def test_views_are_arguments_like_any(device: SimDevice) -> None:
    x_cpu = torch.randn(4, 3)
    values, _ = sim_scale_and_choose(upload(device, x_cpu).t()[1:])
    assert torch.equal(device.peek(values), x_cpu.t()[1:])


def test_lists_of_tensors_are_arguments(device: SimDevice) -> None:
    x, y = torch.ones(2, device="sim"), torch.full((2,), 5.0, device="sim")
    assert device.peek(sim_sum_of(x, [y, y])).tolist() == [11.0, 11.0]
    with pytest.raises(StaleReadError, match="sim_sum_of"):
        sim_sum_of(x, [y, torch.empty(2, device="sim")])


def _launch_wrong_shape(x: Tensor) -> None:
    sim_wrong_shape(x)  # launch


def _launch_wrong_type(x: Tensor) -> None:
    sim_wrong_type(x)  # launch


def _launch_one_too_few(x: Tensor) -> None:
    sim_one_too_few(x)  # launch


def _launch_nothing(x: Tensor) -> None:
    sim_returns_nothing(x)  # launch


def _launch_failure(x: Tensor) -> None:
    sim_fails(x)  # launch


@pytest.mark.parametrize(
    ("launch", "what"),
    [
        (_launch_wrong_shape, r"sim_wrong_shape .* is \(4,\) torch.float32, announced was \(3,\)"),
        (_launch_wrong_type, r"sim_wrong_type .* torch.float32, announced was \(4,\) torch.int32"),
        (_launch_one_too_few, r"sim_one_too_few"),
        (_launch_nothing, r"sim_returns_nothing"),
        (_launch_failure, r"sim_fails .* IndexError: no such page"),
    ],
)
def test_a_fault_names_the_operation_and_the_launching_line(launch: object, what: str) -> None:
    assert callable(launch)
    for seed in range(10):
        device = SimDevice(seed)
        with pytest.raises(DeviceFaultError, match=what) as caught:
            launch(torch.zeros(4, device="sim"))
            device.drain()
        assert marked(launch, "launch") in str(caught.value)


def test_a_fault_inside_a_graph_names_its_operation_and_not_the_replay(device: SimDevice) -> None:
    x = torch.zeros(4, device="sim")
    with device.record(device.graph_pool()) as capture:
        _launch_failure(x)
    assert capture.graph is not None
    with pytest.raises(DeviceFaultError, match=f"sim_fails at {marked(_launch_failure, 'launch')}"):
        capture.graph.replay()
        device.drain()


def test_a_fault_is_later_than_its_launch() -> None:
    num_late = 0
    for seed in SEEDS:
        device = SimDevice(seed)
        x = torch.zeros(4, device="sim")
        try:
            sim_fails(x)
        except DeviceFaultError:
            continue
        num_late += 1
        with pytest.raises(DeviceFaultError):
            device.drain()
    assert num_late > 10


def test_declared_writes_change_their_target(device: SimDevice) -> None:
    target = torch.zeros(4, device="sim")
    assert sim_store(torch.ones(2, device="sim"), target, 1) is None
    assert device.peek(target).tolist() == [0.0, 1.0, 1.0, 0.0]


def test_declared_writes_are_writes_to_the_race_checker() -> None:
    for seed in SEEDS:
        device = SimDevice(seed)
        source, target = torch.ones(2, device="sim"), torch.zeros(4, device="sim")
        order(device, device.compute_stream, device.copy_stream)
        with device.use_stream(device.copy_stream):
            held = target + 1
        with pytest.raises(RaceError, match=r"write by sim_store .* read by add"):
            sim_store(source, target, 1)
        order(device, device.copy_stream, device.compute_stream)
        sim_store(source, target, 1)
        with (
            device.use_stream(device.copy_stream),
            pytest.raises(RaceError, match=r"read by add .* write by sim_store"),
        ):
            target + 1
        assert device.peek(held).tolist() == [1.0] * 4


def test_undeclared_arguments_are_reads(device: SimDevice) -> None:
    source, target = torch.ones(2, device="sim"), torch.zeros(4, device="sim")
    sim_store(source, target, 0)
    order(device, device.compute_stream, device.copy_stream)
    sim_store(source, target, 0)
    with device.use_stream(device.copy_stream):
        held = source + 1
        with pytest.raises(RaceError, match="read by sim_store"):
            source.zero_()
    assert device.peek(held).tolist() == [2.0, 2.0]


def test_a_declared_write_makes_memory_readable_and_a_read_wants_it_written(device: SimDevice) -> None:
    fresh = torch.empty(4, device="sim")
    with pytest.raises(StaleReadError, match="sim_store"):
        sim_store(fresh, torch.zeros(4, device="sim"), 0)
    sim_store(torch.ones(4, device="sim"), fresh, 0)
    assert device.peek(fresh + 1).tolist() == [2.0] * 4


def test_an_operation_may_write_and_return(device: SimDevice) -> None:
    parts, target = torch.ones(3, device="sim"), torch.ones(2, device="sim")
    assert device.peek(sim_clear_all(parts, target)).tolist() == [2.0, 2.0]
    assert device.peek(parts).tolist() == [0.0] * 3


def test_tensors_of_the_host_are_no_arguments(device: SimDevice) -> None:
    x = torch.zeros(4, device="sim")
    for host in (torch.ones(4), pinned(device, [1.0] * 4)):
        with pytest.raises(HostSyncError, match="others, a host tensor among the arguments"):
            sim_sum_of(x, [host])


class SimRows(NamedTuple):
    num_tokens: Tensor
    status: Tensor


@dataclass(frozen=True, slots=True)
class SimBatch:
    rows: SimRows
    starts: Tensor
    mask: Tensor | None
    page_size: int


@operation(like="batch.starts", writes=("batch.rows.num_tokens",))
def sim_advance(batch: SimBatch, by: int) -> Tensor:
    """Rows that run get tokens; gives where their next ones begin."""
    assert type(batch.rows.num_tokens) is Tensor and type(batch.starts) is Tensor, "the body sees plain memory"
    assert isinstance(batch, SimBatch) and isinstance(batch.rows, SimRows) and batch.page_size == 16
    batch.rows.num_tokens.add_(by * batch.rows.status)
    return batch.starts + batch.rows.num_tokens


@operation(writes=("rows",))
def sim_reset(rows: SimRows) -> None:
    rows.num_tokens.zero_()
    rows.status.zero_()


@operation(like=("batch.starts", "other"))
def sim_look(batch: SimBatch, other: Tensor) -> tuple[Tensor, Tensor]:
    return batch.starts.clone(), other.clone()


def _bundle() -> SimBatch:
    rows = SimRows(torch.full((3,), 5.0, device="sim"), torch.ones(3, device="sim"))
    return SimBatch(rows, torch.ones(3, device="sim"), None, 16)


def test_a_bundle_is_taken_apart_for_the_device_and_comes_whole_to_the_body(device: SimDevice) -> None:
    batch = _bundle()
    before = device.num_launched
    next_starts = sim_advance(batch, 2)
    assert device.num_launched == before + 1
    assert device.peek(next_starts).tolist() == [8.0] * 3
    assert device.peek(batch.rows.num_tokens).tolist() == [7.0] * 3
    one, two = sim_look(batch, torch.zeros(2, 4, device="sim"))
    assert (one.shape, two.shape) == ((3,), (2, 4))
    sim_reset(batch.rows)
    assert device.peek(batch.rows.status).tolist() == [0.0] * 3


def test_a_field_is_written_or_read_by_its_own_name() -> None:
    for seed in SEEDS:
        device = SimDevice(seed)
        batch = _bundle()
        order(device, device.compute_stream, device.copy_stream)
        with device.use_stream(device.copy_stream):
            held = batch.rows.status + 1, batch.rows.num_tokens + 1
        with pytest.raises(RaceError, match=r"write by sim_advance .* read by add"):
            sim_advance(batch, 1)
        fresh = replace(batch, rows=batch.rows._replace(num_tokens=torch.zeros(3, device="sim")))
        sim_advance(fresh, 1)  # the status is read by both
        order(device, device.copy_stream, device.compute_stream)
        assert device.peek(held[0]).tolist() == [2.0] * 3


def test_a_field_that_was_never_written_is_named(device: SimDevice) -> None:
    batch = _bundle()
    stale = replace(batch, rows=batch.rows._replace(status=torch.empty(3, device="sim")))
    with pytest.raises(StaleReadError, match=r"sim_advance .* reads batch\.rows\.status, .* never written"):
        sim_advance(stale, 1)
    device.poison(batch.starts)
    with pytest.raises(StaleReadError, match=r"reads batch\.starts, .* poisoned for this step"):
        sim_look(batch, batch.rows.status)


def test_a_recording_replays_over_the_fields_of_a_bundle(device: SimDevice) -> None:
    batch = _bundle()
    with device.record(device.graph_pool()) as capture:
        sim_advance(batch, 1)
    assert capture.graph is not None
    for _ in range(3):
        capture.graph.replay()
    assert device.peek(batch.rows.num_tokens).tolist() == [8.0] * 3
    device.poison(batch.rows.status)
    with pytest.raises(StaleReadError, match=r"sim_advance .* reads batch\.rows\.status"):
        capture.graph.replay()


def test_the_host_may_not_read_a_field(device: SimDevice) -> None:
    batch = _bundle()
    sim_advance(batch, 1)
    with pytest.raises(HostSyncError, match="test_sim_operation"):
        batch.rows.num_tokens[0].item()


def test_a_host_tensor_in_a_bundle_is_named(device: SimDevice) -> None:
    batch = replace(_bundle(), mask=torch.ones(3))
    with pytest.raises(HostSyncError, match=r"batch\.mask, a host tensor among the arguments"):
        sim_advance(batch, 1)
