from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from slipstream.device.operation import operation, spec_of
from slipstream.device.sim import RaceError, SimDevice
from tests.device.sim_setup import SEEDS, event_on, marked, order, upload

seeds = pytest.mark.parametrize("seed", SEEDS)


def _write_then_read_elsewhere(device: SimDevice, x: Tensor, ordered: bool) -> Tensor:
    for _ in range(5):
        x.add_(1)  # the writer
    if ordered:
        order(device, device.compute_stream, device.copy_stream)
    with device.use_stream(device.copy_stream):
        return x * 2  # the reader


@seeds
def test_a_read_on_another_stream_needs_an_event(seed: int) -> None:
    with pytest.raises(RaceError) as caught:
        device = SimDevice(seed)
        _write_then_read_elsewhere(device, torch.zeros(64, device="sim"), ordered=False)
    for mark in ("the writer", "the reader"):
        assert marked(_write_then_read_elsewhere, mark) in str(caught.value)


@seeds
def test_with_an_event_the_values_are_right(seed: int) -> None:
    device = SimDevice(seed)
    x = torch.zeros(64, device="sim")
    assert device.peek(_write_then_read_elsewhere(device, x, ordered=True)).unique().tolist() == [10.0]


def _read_then_write_elsewhere(device: SimDevice, ordered: bool) -> Tensor:
    x = torch.ones(64, device="sim")
    order(device, device.compute_stream, device.copy_stream)
    with device.use_stream(device.copy_stream):
        y = x * 2  # the reader
    if ordered:
        order(device, device.copy_stream, device.compute_stream)
    x.zero_()  # the writer
    return y


@seeds
def test_so_does_a_write_after_a_read(seed: int) -> None:
    with pytest.raises(RaceError) as caught:
        _read_then_write_elsewhere(SimDevice(seed), ordered=False)
    for mark in ("the writer", "the reader"):
        assert marked(_read_then_write_elsewhere, mark) in str(caught.value)
    device = SimDevice(seed)
    assert device.peek(_read_then_write_elsewhere(device, ordered=True)).unique().tolist() == [2.0]


@seeds
def test_two_writes_need_an_event(seed: int) -> None:
    device = SimDevice(seed)
    x = torch.zeros(4, device="sim")
    with device.use_stream(device.copy_stream), pytest.raises(RaceError, match=r"write by zero_ .* write by zero_"):
        x.zero_()


def test_reads_need_no_order_among_themselves() -> None:
    device = SimDevice()
    x = torch.ones(4, device="sim")
    order(device, device.compute_stream, device.copy_stream)
    y = x + 1
    with device.use_stream(device.copy_stream):
        z = x + 2
    assert device.peek(y + 0).tolist() == [2.0] * 4
    assert device.peek(z).tolist() == [3.0] * 4


def test_parts_of_a_tensor_need_no_order() -> None:
    device = SimDevice()
    x = torch.zeros(8, device="sim")
    order(device, device.compute_stream, device.copy_stream)
    x[:4].fill_(1)
    with device.use_stream(device.copy_stream):
        x[4:].fill_(2)
        with pytest.raises(RaceError, match="bytes 12 to 16"):
            x[3:].fill_(2)


def test_an_event_orders_what_came_before_it_only() -> None:
    device = SimDevice()
    x = torch.zeros(4, device="sim")
    event = event_on(device, device.compute_stream)
    x.add_(1)
    device.copy_stream.wait_event(event)
    with device.use_stream(device.copy_stream), pytest.raises(RaceError):
        x.clone()


def test_a_wait_is_for_what_the_event_meant_then() -> None:
    device = SimDevice()
    x = torch.zeros(4, device="sim")
    event = event_on(device, device.compute_stream)
    device.copy_stream.wait_event(event)
    x.add_(1)
    event.record(device.compute_stream)
    with device.use_stream(device.copy_stream), pytest.raises(RaceError):
        x.clone()


def test_order_is_handed_on() -> None:
    for seed in SEEDS:
        device = SimDevice(seed, num_streams=3)
        first, second, third = device.streams
        x = torch.zeros(4, device="sim")
        for _ in range(9):
            x += 1
        order(device, first, second)
        order(device, second, third)
        with device.use_stream(third):
            assert device.peek(x * 2).tolist() == [18.0] * 4


def _output(device: SimDevice) -> tuple[Tensor, Tensor]:
    """Pinned memory, and the values on their way there by the copy stream."""
    x = torch.zeros(16, device="sim")
    for _ in range(7):
        x += 1
    order(device, device.compute_stream, device.copy_stream)
    target = device.pinned_empty((16,), torch.float32)
    with device.use_stream(device.copy_stream):
        device.copy_async(target, x)  # the copy
    return target, x


@seeds
def test_output_read_before_its_event_is_a_race(seed: int) -> None:
    target, _x = _output(SimDevice(seed))
    with pytest.raises(RaceError, match=f"the host's read by tolist .*{marked(_output, 'the copy')}"):
        target.tolist()


@seeds
def test_output_read_after_a_wait_for_its_event_is_fine(seed: int) -> None:
    device = SimDevice(seed)
    target, _x = _output(device)
    event = event_on(device, device.copy_stream)
    with device.sync_guard.allow("collect"):
        event.synchronize()
    assert target.tolist() == [7.0] * 16


@seeds
def test_a_true_query_orders_too(seed: int) -> None:
    device = SimDevice(seed)
    target, _x = _output(device)
    event = event_on(device, device.copy_stream)
    tries = 0
    while not event.query():
        with pytest.raises(RaceError):
            target.tolist()
        tries += 1
        assert tries < 10_000
    assert target.tolist() == [7.0] * 16


@seeds
def test_waiting_for_the_wrong_event_is_not_enough(seed: int) -> None:
    device = SimDevice(seed)
    target, _x = _output(device)
    event = event_on(device, device.compute_stream)
    with device.sync_guard.allow("collect"):
        event.synchronize()
    with pytest.raises(RaceError):
        target.tolist()


@seeds
def test_an_event_behind_a_wait_comes_after_what_was_waited_for(seed: int) -> None:
    """Nothing runs on the stream between the wait and the event."""
    device = SimDevice(seed)
    target, _x = _output(device)
    order(device, device.copy_stream, device.compute_stream)
    event = event_on(device, device.compute_stream)
    with device.sync_guard.allow("collect"):
        event.synchronize()
    assert target.tolist() == [7.0] * 16


def test_an_event_that_was_never_recorded_is_done() -> None:
    device = SimDevice()
    event = device.event()
    device.copy_stream.wait_event(event)
    assert event.query()
    with device.sync_guard.allow("collect"):
        event.synchronize()


def _temporary_freed_too_early(device: SimDevice, ordered: bool) -> Tensor:
    temporary = torch.ones(64, device="sim") + 1
    order(device, device.compute_stream, device.copy_stream)
    with device.use_stream(device.copy_stream):
        result = temporary * 3  # the reader
    if ordered:
        order(device, device.copy_stream, device.compute_stream)
    del temporary
    return result


@pytest.mark.parametrize(
    "next_call",
    [
        lambda device: torch.zeros(1, device="sim"),
        lambda device: device.drain(),
        lambda device: event_on(device, device.copy_stream).query(),
        lambda device: event_on(device, device.copy_stream).synchronize(),
        lambda device: device.pinned_empty((1,), torch.float32).zero_(),
    ],
    ids=["launch", "drain", "query", "synchronize", "pinned"],
)
def test_a_temporary_freed_under_another_stream_is_a_race(next_call: Callable[[SimDevice], object]) -> None:
    """The error is found in a destructor, where it would vanish; the next call of any kind raises it."""
    for seed in SEEDS:
        device = SimDevice(seed)
        with device.sync_guard.allow("collect"), pytest.raises(RaceError) as caught:
            _temporary_freed_too_early(device, ordered=False)
            next_call(device)
        assert "the end of add at" in str(caught.value)
        assert marked(_temporary_freed_too_early, "the reader") in str(caught.value)
        device.drain()  # the error is told once


@seeds
def test_a_temporary_freed_in_order_is_fine(seed: int) -> None:
    device = SimDevice(seed)
    result = _temporary_freed_too_early(device, ordered=True)
    torch.zeros(64, device="sim")
    assert device.peek(result).unique().tolist() == [6.0]


def test_a_refused_operation_leaves_the_stream_usable() -> None:
    device = SimDevice()
    x = torch.zeros(4, device="sim")
    with device.use_stream(device.copy_stream), pytest.raises(RaceError):
        x.clone()
    order(device, device.compute_stream, device.copy_stream)
    with device.use_stream(device.copy_stream):
        y = x + 1
    event = event_on(device, device.copy_stream)
    with device.sync_guard.allow("collect"):
        event.synchronize()
        assert y.tolist() == [1.0] * 4


_course: list[str] = []


@operation(lambda x, name: spec_of(x))
def noted_in_course(x: Tensor, name: str) -> Tensor:
    _course.append(name)
    return x + 1


def _run_course(seed: int) -> list[str]:
    _course.clear()
    device = SimDevice(seed)
    first = upload(device, torch.zeros(2))
    with device.use_stream(device.copy_stream):
        second = upload(device, torch.zeros(2))
    for i in range(60):
        first = noted_in_course(first, f"first {i}")
        with device.use_stream(device.copy_stream):
            second = noted_in_course(second, f"second {i}")
        if i % 20 == 19:
            order(device, device.copy_stream, device.compute_stream)
        _course.append("host")
    device.drain()
    return list(_course)


def test_a_seed_is_an_interleaving() -> None:
    courses = [_run_course(seed) for seed in range(12)]
    assert courses == [_run_course(seed) for seed in range(12)]
    assert len({tuple(course) for course in courses}) > 6, "seeds differ"


def test_every_course_keeps_the_order_of_each_stream() -> None:
    for seed in range(12):
        course = _run_course(seed)
        for stream in ("first", "second"):
            assert [name for name in course if name.startswith(stream)] == [f"{stream} {i}" for i in range(60)]
