from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.device.sim import SimDevice, SimTensor, StaleReadError
from tests.device.sim_setup import SEEDS, marked, order


@pytest.fixture
def device() -> SimDevice:
    return SimDevice(3)


def _read_of_nothing() -> Tensor:
    x = torch.empty(4, device="sim")  # the maker
    return x + 1  # the reader


def test_a_read_before_any_write_names_reader_and_maker(device: SimDevice) -> None:
    with pytest.raises(StaleReadError) as caught:
        _read_of_nothing()
    for mark in ("the maker", "the reader"):
        assert marked(_read_of_nothing, mark) in str(caught.value)


READS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "compute": lambda x, y: x * 2,
    "in place": lambda x, y: x.add_(1),
    "copy": lambda x, y: y.copy_(x),
    "operand": lambda x, y: y.add_(x),
    "cat": lambda x, y: torch.cat([y, x]),
    "out": lambda x, y: torch.add(x, 1, out=y),
    "contiguous": lambda x, y: x.view(2, 2).t().contiguous(),
    "index": lambda x, y: y[x.long()],
    "tolist": lambda x, y: x.tolist(),
    "item": lambda x, y: x[0].item(),
    "cpu": lambda x, y: x.cpu(),
    "nonzero": lambda x, y: x.nonzero(),
    "number": lambda x, y: torch.tensor([x[0]]),
}


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.empty(4, device="sim"),
        lambda x: torch.empty_strided((4,), (1,), device="sim"),
        lambda x: torch.empty_like(x),
        lambda x: x.new_empty(4),
        lambda x: x.new_empty_strided((4,), (1,)),
        lambda x: torch.empty(2, 4, device="sim")[1],
    ],
    ids=["empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "view"],
)
@pytest.mark.parametrize("read", READS)
def test_fresh_memory_cannot_be_read(device: SimDevice, make: Callable[[Tensor], Tensor], read: str) -> None:
    y = torch.ones(4, device="sim")
    x = make(y)
    with device.sync_guard.allow("collect"), pytest.raises(StaleReadError, match="never written"):
        READS[read](x, y)


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.zero_(),
        lambda x: x.fill_(2.0),
        lambda x: x.copy_(torch.ones(4, device="sim")),
        lambda x: x.normal_(),
        lambda x: x.uniform_(),
        lambda x: x.exponential_(),
        lambda x: x.random_(0, 5),
        lambda x: x.bernoulli_(0.5),
        lambda x: torch.add(torch.ones(4, device="sim"), 1, out=x),
        lambda x: [x[:2].zero_(), x[2:].zero_()],
        lambda x: [part.fill_(1) for part in x.unbind()],
    ],
)
def test_an_overwrite_makes_memory_readable(device: SimDevice, write: Callable[[Tensor], Any]) -> None:
    x = torch.empty(4, device="sim")
    write(x)
    assert device.peek(x + 0).isfinite().all()


@pytest.mark.parametrize(
    "call",
    [
        torch.empty_like,
        torch.zeros_like,
        torch.ones_like,
        torch.rand_like,
        torch.randn_like,
        lambda x: torch.full_like(x, 3.0),
        lambda x: x.new_zeros(3),
        lambda x: x.new_full((2,), 1.0),
        lambda x: x.new_ones(2),
    ],
)
def test_taking_a_shape_is_not_a_read(device: SimDevice, call: Callable[[Tensor], Tensor]) -> None:
    like = call(torch.empty(4, device="sim"))
    order(device, device.compute_stream, device.copy_stream)
    assert isinstance(like, SimTensor)


def test_half_a_write_makes_half_readable(device: SimDevice) -> None:
    x = torch.empty(8, device="sim")
    x[:4].fill_(1)
    assert device.peek(x[1:3] + 1).tolist() == [2.0, 2.0]
    with pytest.raises(StaleReadError, match="bytes 16 to 32"):
        x + 1
    with pytest.raises(StaleReadError, match="bytes 16 to 20"):
        x[3:5] + 1
    x[6:].fill_(1)
    with pytest.raises(StaleReadError, match="bytes 16 to 24"):
        x + 1
    x[4:6].fill_(1)
    assert device.peek(x + 1).tolist() == [2.0] * 8


def _poison(device: SimDevice, x: Tensor) -> None:
    device.poison(x)  # the poison


def test_poisoned_memory_cannot_be_read(device: SimDevice) -> None:
    x = torch.ones(8, device="sim")
    _poison(device, x)
    with pytest.raises(StaleReadError, match=f"poisoned for this step by poison at {marked(_poison, 'the poison')}"):
        x + 1
    x[:4].fill_(2)
    assert device.peek(x[:4] + 1).tolist() == [3.0] * 4
    with pytest.raises(StaleReadError, match="bytes 16 to 32"):
        x + 1


def test_poison_of_a_part_leaves_the_rest(device: SimDevice) -> None:
    x = torch.ones(8, device="sim")
    device.poison(x[2:4])
    assert device.peek(torch.cat([x[:2], x[4:]])).tolist() == [1.0] * 6
    with pytest.raises(StaleReadError, match="bytes 8 to 16"):
        x.clone()


def test_poison_comes_in_stream_order() -> None:
    for seed in SEEDS:
        device = SimDevice(seed)
        x = torch.ones(4, device="sim")
        before = x + 1
        device.poison(x)
        x.fill_(5)
        assert device.peek(before).tolist() == [2.0] * 4
        assert device.peek(x).tolist() == [5.0] * 4


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int16, torch.int32, torch.int64],
    ids=str,
)
def test_poison_is_no_value_of_any_type(device: SimDevice, dtype: torch.dtype) -> None:
    fresh = device.peek(torch.empty(6, dtype=dtype, device="sim"))
    x = torch.zeros(6, dtype=dtype, device="sim")
    device.poison(x)
    for values in (fresh, device.peek(x)):
        assert values.isnan().all() if dtype.is_floating_point else (values >= 0x7FF1).all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.float8_e4m3fn], ids=str)
def test_types_of_one_byte_can_be_poisoned(device: SimDevice, dtype: torch.dtype) -> None:
    x = torch.zeros(6, dtype=dtype, device="sim")
    device.poison(x)
    assert device.peek(x.view(torch.uint8)).tolist() == [0xF1] * 6
    with pytest.raises(StaleReadError):
        x.clone()


def test_freed_memory_is_reused_and_holds_nothing() -> None:
    for seed in SEEDS:
        device = SimDevice(seed)
        x = torch.full((16,), 7.0, device="sim")
        assert isinstance(x, SimTensor)
        block = x.handle.block
        del x
        y = torch.empty(16, device="sim")
        assert isinstance(y, SimTensor)
        assert y.handle.block is block
        with pytest.raises(StaleReadError, match="never written"):
            y + 1
        assert device.peek(y).isnan().all()


def test_work_queued_before_the_end_still_finds_its_values() -> None:
    for seed in SEEDS:
        device = SimDevice(seed)
        results = []
        for i in range(20):
            temporary = torch.full((16,), float(i), device="sim")
            results.append(temporary * 2)
            del temporary
        found = [device.peek(result).unique().tolist() for result in results]
        assert found == [[2.0 * i] for i in range(20)]


def test_memory_freed_inside_a_recording_holds_nothing_either() -> None:
    for seed in range(10):
        device = SimDevice(seed)
        x = torch.full((16,), 7.0, device="sim")
        with device.record(device.graph_pool()):
            del x
            torch.zeros(1, device="sim")
        assert device.peek(torch.empty(16, device="sim")).isnan().all()


def test_streams_do_not_share_freed_memory(device: SimDevice) -> None:
    x = torch.zeros(16, device="sim")
    assert isinstance(x, SimTensor)
    block = x.handle.block
    del x
    with device.use_stream(device.copy_stream):
        y = torch.zeros(16, device="sim")
    assert isinstance(y, SimTensor)
    assert y.handle.block is not block


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[4:8],
        lambda x: x.view(4, 4)[1],
        lambda x: x.view(4, 4).t()[:, 1],
        lambda x: x.split(4)[1],
        lambda x: x.unbind()[4].view(1).expand(4),
        lambda x: x.view(torch.int32)[4:8].view(torch.float32),
        lambda x: x.detach()[4:8],
        lambda x: x.data[4:8],
    ],
)
def test_views_keep_memory_alive(view: Callable[[Tensor], Tensor]) -> None:
    for seed in range(10):
        device = SimDevice(seed)
        x = torch.full((16,), 7.0, device="sim")
        part = view(x)
        del x
        torch.zeros(16, device="sim")
        assert device.peek(part + 1).tolist() == [8.0] * 4


def test_a_view_that_replaced_its_tensor_keeps_memory_alive(device: SimDevice) -> None:
    x = torch.full((2, 3), 7.0, device="sim")
    x.t_().unsqueeze_(0)
    torch.zeros(2, 3, device="sim")
    assert device.peek(x + 1).tolist() == [[[8.0, 8.0]] * 3]


def test_memory_without_bytes_needs_no_care(device: SimDevice) -> None:
    x = torch.empty(0, 4, device="sim")
    device.poison(x)
    assert device.peek(x + 1).shape == (0, 4)
    with device.sync_guard.allow("collect"):
        assert x.tolist() == []
