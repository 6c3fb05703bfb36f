from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.device.sim import SimDevice, SimError
from slipstream.device.sync_guard import HostSyncError
from tests.device.sim_setup import event_on, marked, upload


class Inputs(NamedTuple):
    x: Tensor  # [4] float32
    n: Tensor  # [4] int64, row numbers of grid
    grid: Tensor  # [4, 2] float32
    mask: Tensor  # [4] bool, two are true

    @property
    def device(self) -> torch.device:
        return self.x.device


def host_inputs() -> Inputs:
    x = torch.tensor([1.5, -2.0, 4.0, 0.0])
    return Inputs(x, torch.tensor([1, 0, 2, 3]), torch.arange(8.0).view(4, 2), x > 0)


def _set(target: Tensor, index: Any, value: Any) -> Tensor:
    target[index] = value  # the assignment
    return target


# One line each: the error has to name it.
READS: dict[str, Callable[[Inputs], Any]] = {
    "item": lambda t: t.x[0].item(),
    "item of a sum": lambda t: t.x.sum().item(),
    "float": lambda t: float(t.x[2]),
    "int": lambda t: int(t.n[2]),
    "complex": lambda t: complex(t.x[2]),
    "bool": lambda t: bool(t.mask[0]),
    "not": lambda t: not t.mask[0],
    "if": lambda t: "yes" if (t.x > 3).any() else "no",
    "in": lambda t: 4.0 in t.x,
    "math": lambda t: math.sqrt(t.x[2]),
    "range": lambda t: list(range(t.n[2])),
    "list of numbers": lambda t: [float(v) for v in t.x],
    "old formatting": lambda t: "%d" % t.n[2],  # noqa: UP031
    "is_nonzero": lambda t: torch.is_nonzero(t.x[1]),
    "tolist": lambda t: t.grid.tolist(),
    "tolist of a scalar": lambda t: t.x[0].tolist(),
    "numpy": lambda t: t.grid.numpy(),
    "numpy by force": lambda t: t.grid.numpy(force=True),
    "np.asarray": lambda t: np.asarray(t.grid),
    "np.asarray of a type": lambda t: np.asarray(t.grid, dtype=np.float64),
    "cpu": lambda t: t.grid.cpu(),
    "cpu of a view": lambda t: t.grid.t()[1].cpu(),
    "to the host": lambda t: t.grid.to("cpu", copy=True),
    "to the host, not blocking": lambda t: t.grid.to("cpu", non_blocking=True),
    "to the host and a type": lambda t: t.grid.to("cpu", torch.float64),
    "copy to host memory": lambda t: torch.zeros(4).copy_(t.x),
    "copy to host memory, not blocking": lambda t: torch.zeros(4).copy_(t.x, non_blocking=True),
    "host tensor of device numbers": lambda t: torch.tensor([t.x[0], t.x[1]]),
    "nonzero": lambda t: t.x.nonzero(),
    "nonzero as a tuple": lambda t: t.x.nonzero(as_tuple=True)[0],
    "argwhere": lambda t: torch.argwhere(t.x),
    "where of one argument": lambda t: torch.where(t.mask)[0],
    "mask index": lambda t: t.x[t.mask],
    "mask index beside a slice": lambda t: t.grid[t.mask, 1:],
    "masked_select": lambda t: t.grid[:, 0].masked_select(t.mask),
    "mask assignment of a tensor": lambda t: _set(t.x, t.mask, t.grid[0]),
    "mask assignment of rows": lambda t: _set(t.grid, t.mask, t.x[:2]),
    "mask assignment beside an index": lambda t: _set(t.grid, (t.mask, t.n[:2] * 0), 7.0),
    "mask assignment that accumulates": lambda t: t.x.index_put_((t.mask,), t.grid[3, 1], accumulate=True),
    "repeat_interleave without a size": lambda t: t.x.repeat_interleave(t.n),
    "repeat_interleave of counts": lambda t: torch.repeat_interleave(t.n),
    "unique": lambda t: t.x.unique(),
    "unique with counts": lambda t: t.x.unique(return_counts=True)[1],
    "unique_consecutive": lambda t: t.x.unique_consecutive(),
    "bincount": lambda t: t.n.bincount(),
    "equal": lambda t: torch.equal(t.x, t.x),
    "allclose": lambda t: torch.allclose(t.x, t.x + 1),
    "one_hot of unknown size": lambda t: torch.nn.functional.one_hot(t.n),
    "tensor from a list": lambda t: torch.tensor([1.0, 2.0], device=t.device),
    "tensor from an array": lambda t: torch.as_tensor(np.ones(2), device=t.device),
    "host tensor to the device": lambda t: torch.ones(2).to(t.device),
    "host tensor to the device, not blocking": lambda t: torch.ones(2).to(t.device, non_blocking=True),
    "list index": lambda t: t.x[[0, 1]],
    "array index": lambda t: t.x[np.array([0, 1])],
    "host tensor index": lambda t: t.x[torch.tensor([0, 1])],
    "host tensor index beside a slice": lambda t: t.grid[1:, torch.tensor([1, 0])],
    "device number as an index": lambda t: t.grid[1:, t.n[0]],
    "slice to a device number": lambda t: t.x[: t.n[2]],
    "assignment by a host tensor": lambda t: _set(t.x, torch.tensor([0, 1]), t.grid[3]),
    "copy_ from pageable memory": lambda t: t.x.copy_(torch.ones(4)),
    "copy_ from pageable memory, not blocking": lambda t: t.x.copy_(torch.ones(4), non_blocking=True),
    "assignment from pageable memory": lambda t: _set(t.x, slice(2), torch.ones(2)),
}


def on_host(device: SimDevice | None, result: Any) -> Any:
    if isinstance(result, np.ndarray):
        result = torch.from_numpy(result)
    if isinstance(result, Tensor):
        values = result if device is None or result.device.type == "cpu" else device.peek(result)
        return values.dtype, values.tolist()
    return type(result), result


@pytest.fixture
def device() -> SimDevice:
    return SimDevice(3)


@pytest.fixture
def inputs(device: SimDevice) -> Inputs:
    return Inputs(*(upload(device, tensor) for tensor in host_inputs()))


@pytest.mark.parametrize("in_inference_mode", [False, True], ids=["", "inference"])
@pytest.mark.parametrize("name", READS)
def test_a_read_of_the_host_raises_and_names_its_line(inputs: Inputs, name: str, in_inference_mode: bool) -> None:
    read = READS[name]
    with torch.inference_mode(in_inference_mode), pytest.raises(HostSyncError) as caught:
        read(inputs)
    assigns = "_set" in read.__code__.co_names
    site = marked(_set, "the assignment") if assigns else f"test_sim_host_reads.py:{read.__code__.co_firstlineno}"
    assert f"at {site}" in str(caught.value)


@pytest.mark.parametrize("name", READS)
def test_where_waiting_is_allowed_a_read_gives_the_values(name: str) -> None:
    expected_inputs = host_inputs()
    expected = on_host(None, READS[name](expected_inputs))
    for seed in range(4):
        device = SimDevice(seed)
        inputs = Inputs(*(upload(device, tensor) for tensor in host_inputs()))
        with device.sync_guard.allow("collect"):
            found = READS[name](inputs)
        assert on_host(device, found) == expected
        for left, right in zip(inputs, expected_inputs, strict=True):
            assert on_host(device, left) == on_host(None, right)


def test_a_read_waits_for_everything_before_it() -> None:
    for seed in range(20):
        device = SimDevice(seed)
        x = torch.zeros(3, device="sim")
        for _ in range(30):
            x += 1
        with device.sync_guard.allow("collect"):
            assert x.tolist() == [30.0, 30.0, 30.0]


def test_a_read_is_a_copy() -> None:
    device = SimDevice()
    x = torch.zeros(3, device="sim")
    with device.sync_guard.allow("collect"):
        host, array = x.cpu(), x.numpy()
    x += 1
    device.drain()
    assert host.tolist() == array.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "show",
    [repr, str, print, lambda x: f"{x}", lambda x: f"{x:.3f}", lambda x: "%s" % x, lambda x: f"{x[0]}"],  # noqa: UP031
    ids=["repr", "str", "print", "f-string", "format", "percent", "number"],
)
def test_showing_a_tensor_neither_raises_nor_waits(show: Callable[[Tensor], Any]) -> None:
    for seed in range(10):
        device = SimDevice(seed)
        x = torch.zeros(2, 3, device="sim") + 1
        before = device.streams[0].num_done
        shown = show(x)
        assert device.streams[0].num_done == before
        assert shown is None or "SimTensor(" in shown


@pytest.mark.parametrize("give", [lambda x: x.data_ptr(), lambda x: x.__dlpack__()], ids=["data_ptr", "dlpack"])
def test_device_memory_cannot_be_exported(device: SimDevice, inputs: Inputs, give: Callable[[Tensor], Any]) -> None:
    with device.sync_guard.allow("collect"), pytest.raises(HostSyncError, match="device memory"):
        give(inputs.x)


def _wait_for(device: SimDevice) -> None:
    event = event_on(device, device.compute_stream)
    event.synchronize()  # the wait


def test_waiting_for_an_event_is_a_wait(device: SimDevice, inputs: Inputs) -> None:
    with pytest.raises(HostSyncError, match=marked(_wait_for, "the wait")):
        _wait_for(device)
    with device.sync_guard.allow("collect"):
        _wait_for(device)


def test_a_warm_up_ends_with_a_wait(device: SimDevice) -> None:
    with pytest.raises(HostSyncError, match="warm_up"), device.warm_up():
        torch.zeros(3, device="sim")
    with device.sync_guard.allow("capture"), device.warm_up():
        x = torch.zeros(3, device="sim")
    assert not device.streams[0].queue
    assert device.peek(x).tolist() == [0.0, 0.0, 0.0]


def test_out_of_unknown_size_is_refused(device: SimDevice, inputs: Inputs) -> None:
    out = torch.empty(0, dtype=torch.int64, device="sim")
    with device.sync_guard.allow("build"), pytest.raises(SimError, match="the size of its out= depends on values"):
        torch.nonzero(inputs.x, out=out)


def test_copies_within_the_device_do_not_wait(inputs: Inputs) -> None:
    inputs.x.copy_(inputs.grid[:, 0])
    inputs.x.copy_(torch.tensor(3.0))  # a number, not a copy of memory
    assert copy.deepcopy(inputs.x).shape == (4,)
