from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.device.sim import SimDevice, SimError, SimTensor
from tests.device.operator_table import CALLS, Operands
from tests.device.sim_setup import upload


def flat(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [tensor for part in result for tensor in flat(part)]


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


@pytest.mark.parametrize("in_inference_mode", [False, True], ids=["", "inference"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_gives_what_a_cpu_gives(name: str, in_inference_mode: bool) -> None:
    with torch.inference_mode(in_inference_mode):
        on_cpu = Operands(torch.device("cpu"), Tensor.clone)
        expected = [*flat(CALLS[name](on_cpu)), *on_cpu.used.values()]
        for seed in range(4):
            device = SimDevice(seed)
            on_sim = Operands(device.torch_device, partial(upload, device))
            found = [*flat(CALLS[name](on_sim)), *on_sim.used.values()]
            for left, right in zip(found, expected, strict=True):
                assert isinstance(left, SimTensor)
                assert (left.shape, left.stride(), left.dtype) == (right.shape, right.stride(), right.dtype)
                values = device.peek(left)
                assert (values.shape, values.dtype) == (right.shape, right.dtype)
                assert torch.equal(bits(values), bits(right))


def test_the_table_is_long_enough() -> None:
    assert len(CALLS) >= 120


@pytest.mark.parametrize(
    "call",
    [
        lambda x, y: x @ x,
        lambda x, y: x + y,
        lambda x, y: x.add_(y),
        lambda x, y: x.copy_(y),
        lambda x, y: torch.cat([x, y], dim=1),
        lambda x, y: x.view(5, 5),
    ],
    ids=["matmul", "add", "add_", "copy_", "cat", "view"],
)
def test_shapes_that_do_not_fit_are_an_error_at_once(call: Any) -> None:
    device = SimDevice()
    x, y = upload(device, torch.ones(3, 4)), upload(device, torch.ones(2, 3))
    before = device.num_launched
    with pytest.raises(RuntimeError, match=r"size|dim|shape"):
        call(x, y)
    assert device.num_launched == before


def test_results_have_a_shape_before_they_have_values() -> None:
    num_lagging = 0
    for seed in range(20):
        device = SimDevice(seed)
        x = torch.ones(2, 3, device="sim")
        y = (x @ x.t()).softmax(-1)[:, :1]
        assert y.shape == (2, 1)
        num_lagging += len(device.streams[0].queue) > 0
    assert num_lagging > 5, "on some seeds the device is slower than the host"


def test_numbers_of_the_host_are_taken_when_the_call_is_made() -> None:
    for seed in range(20):
        device = SimDevice(seed)
        number = torch.tensor(2.0)
        y = torch.ones(3, device="sim") * number
        number.fill_(100.0)
        assert device.peek(y).tolist() == [2.0, 2.0, 2.0]


def test_modules_move_and_convert() -> None:
    device = SimDevice()
    module = torch.nn.Linear(4, 2)
    x = torch.randn(3, 4, dtype=torch.float64)
    with device.sync_guard.allow("build"):
        on_sim = copy.deepcopy(module).to("sim").double()
    assert on_sim.weight.dtype == device.peek(on_sim.weight).dtype == torch.float64
    with torch.inference_mode():
        found = device.peek(on_sim(upload(device, x)))
        assert torch.equal(found, module.double()(x))


def test_deep_copies_have_memory_of_their_own() -> None:
    device = SimDevice()
    x = torch.ones(3, device="sim")
    first, second = copy.deepcopy([x, x])
    x.zero_()
    assert first is second
    assert device.peek(first).tolist() == [1.0, 1.0, 1.0]


def test_data_can_be_exchanged() -> None:
    device = SimDevice()
    x, y = torch.zeros(3, device="sim"), torch.ones(2, device="sim")
    x.data = y
    y.add_(1)
    assert x.shape == (2,)
    assert device.peek(x).tolist() == [2.0, 2.0]
    assert device.peek(x.data).tolist() == [2.0, 2.0]


def test_questions_about_a_tensor_are_answered_without_waiting() -> None:
    device = SimDevice()
    x = torch.zeros(3, 4, device="sim")
    assert not x.is_pinned()
    assert torch.ops.aten.is_same_size(x, x.clone())
    assert (len(x), x.numel(), x.t().is_contiguous(), x.device.type, x.dtype) == (3, 12, False, "sim", torch.float32)
    assert device.torch_device == x.device


@pytest.mark.parametrize("call", [lambda x: x.resize_(8), lambda x: x.set_(x.clone()), lambda x: x.resize_as_(x[:1])])
def test_memory_is_not_changed_under_a_tensor(call: Any) -> None:
    device = SimDevice()
    x = torch.zeros(3, device="sim")
    with pytest.raises(SimError, match="keeps the memory it was allocated with"):
        call(x)
    assert device.peek(x).tolist() == [0.0, 0.0, 0.0]


def test_an_out_argument_of_another_shape_is_refused() -> None:
    device = SimDevice()
    x, out = torch.zeros(3, device="sim"), torch.zeros(2, device="sim")
    with pytest.warns(UserWarning, match="was resized"), pytest.raises(ValueError, match=r"out has shape \(2,\)"):
        torch.add(x, 1, out=out)
    assert device.peek(out).tolist() == [0.0, 0.0]


def test_operators_that_write_and_return_something_else_are_refused() -> None:
    device = SimDevice()
    x, one = torch.ones(2, 3, device="sim"), torch.ones(3, device="sim")
    with pytest.raises(SimError, match="writes to its arguments and returns others"):
        torch.ops.aten._native_batch_norm_legit(x, one, one, one.clone(), one.clone(), True, 0.1, 1e-5)
    assert device.peek(x).unique().tolist() == [1.0]
