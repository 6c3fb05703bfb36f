from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.device.sim import RaceError, SimDevice, SimError, StaleReadError
from slipstream.device.sync_guard import HostSyncError
from tests.device.sim_setup import SEEDS, event_on, marked, pinned, upload


@pytest.fixture
def device() -> SimDevice:
    return SimDevice(3)


def _send(device: SimDevice, target: Tensor, source: Tensor) -> None:
    device.copy_async(target, source)  # the copy


def _with_out(target: Tensor) -> None:
    torch.add(torch.ones(4), 1, out=target)


def _with_outs(target: Tensor) -> None:
    torch.max(torch.ones(4, 2), 1, out=(target, torch.empty(4, dtype=torch.int64)))


def _plus(target: Tensor) -> None:
    target += 1


def _assign(target: Tensor, index: Any) -> None:
    target[index] = 9.0


def _other_pinned() -> Tensor:
    return pinned(SimDevice.current(), [0.0] * 4)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "fill_": lambda p: p.fill_(9.0),
    "zero_": lambda p: p.zero_(),
    "copy_": lambda p: p.copy_(torch.ones(4)),
    "+=": _plus,
    "out": _with_out,
    "several outs": _with_outs,
    "assignment": lambda p: _assign(p, 0),
    "assignment to a slice": lambda p: _assign(p, slice(1, 3)),
    "assignment by index": lambda p: _assign(p, torch.tensor([0, 1])),
    "assignment by mask": lambda p: _assign(p, torch.tensor([True, False, False, False])),
    "write to a view": lambda p: p[1:].add_(1),
    "write to a reshaped view": lambda p: p.view(2, 2).t().mul_(2),
    "write to a part": lambda p: p.split(2)[1].zero_(),
    "numpy": lambda p: p.numpy(),
    "numpy of a view": lambda p: p[:2].numpy(),
    "np.asarray": lambda p: np.asarray(p),
}
READS: dict[str, Callable[[Tensor], Any]] = {
    "tolist": lambda p: p.tolist(),
    "item": lambda p: p[0].item(),
    "float": lambda p: float(p[0]),
    "computation": lambda p: p + 1,
    "number first": lambda p: 1 + p,
    "function": lambda p: torch.sum(p),
    "second operand": lambda p: torch.ones(4) + p,
    "copy to another tensor": lambda p: torch.zeros(4).copy_(p),
    "copy to another pinned tensor": lambda p: _other_pinned().copy_(p),
    "assignment to another pinned tensor": lambda p: _other_pinned().__setitem__(slice(4), p),
    "result in another pinned tensor": lambda p: torch.add(p, 1, out=_other_pinned()),
    "named argument": lambda p: torch.add(torch.ones(4), other=p),
    "named argument of a method": lambda p: torch.ones(4).add_(other=p),
    "clone": lambda p: p.clone(),
    "cat": lambda p: torch.cat([torch.ones(2), p]),
    "stack": lambda p: torch.stack((p, p)),
    "index by tensor": lambda p: p[torch.tensor([0, 2])],
    "index by mask": lambda p: p[torch.ones(4, dtype=torch.bool)],
    "reshape with a copy": lambda p: p.view(2, 2).t().reshape(4),
    "conversion": lambda p: p.double(),
    "comparison": lambda p: p == 1,
    "equal": lambda p: torch.equal(p, torch.ones(4)),
    "iteration": lambda p: [float(v) for v in p],
    "repr": repr,
    "bool": lambda p: bool(p[0]),
}
LOOKS: dict[str, Callable[[Tensor], Any]] = {
    "slice": lambda p: p[1:],
    "element": lambda p: p[0],
    "view": lambda p: p.view(2, 2),
    "transposed view": lambda p: p.view(2, 2).T,
    "view of a type": lambda p: p.view(torch.int32),
    "reshape": lambda p: p.reshape(2, 2),
    "unsqueeze": lambda p: p.unsqueeze(0).squeeze(0),
    "expand": lambda p: p.expand(3, 4),
    "permute": lambda p: p.view(2, 2).permute(1, 0),
    "split": lambda p: p.split(2),
    "unbind": lambda p: p.unbind(),
    "detach": lambda p: p.detach(),
    "shape": lambda p: (p.shape, p.size(0), p.dim(), p.ndim, p.numel(), len(p), p.stride(), p.dtype, p.device),
}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_write_while_a_copy_from_it_is_queued_is_a_race(seed: int) -> None:
    device = SimDevice(seed)
    source, target = pinned(device, [1.0, 2.0]), torch.zeros(2, device="sim")
    _send(device, target, source)
    with pytest.raises(RaceError, match=f"the host's write by fill_ .*{marked(_send, 'the copy')}"):
        source.fill_(9.0)


@pytest.mark.parametrize("name", WRITES)
def test_every_way_of_writing_is_seen(device: SimDevice, name: str) -> None:
    source, target = pinned(device, [1.0] * 4), torch.zeros(4, device="sim")
    _send(device, target, source)
    with pytest.raises(RaceError, match=f"the host's write by .*{marked(_send, 'the copy')}"):
        WRITES[name](source)


@pytest.mark.parametrize("name", READS)
def test_every_way_of_reading_is_seen(device: SimDevice, name: str) -> None:
    source, target = torch.zeros(4, device="sim"), pinned(device, [1.0] * 4)
    _send(device, target, source)
    with pytest.raises(RaceError, match=f"the host's read by .*{marked(_send, 'the copy')}"):
        READS[name](target)


@pytest.mark.parametrize("name", [*READS, *WRITES])
def test_after_the_event_everything_is_allowed(name: str) -> None:
    device = SimDevice(4)
    use = {**READS, **WRITES}[name]
    source, target = torch.zeros(4, device="sim"), pinned(device, [1.0] * 4)
    for into, values in ((target, source), (source, target)):
        _send(device, into, values)
        event = event_on(device, device.compute_stream)
        with device.sync_guard.allow("collect"):
            event.synchronize()
        use(target)


@pytest.mark.parametrize("name", LOOKS)
def test_looking_at_no_value_is_always_allowed(device: SimDevice, name: str) -> None:
    target = device.pinned_empty((4,), torch.float32)
    LOOKS[name](target)
    _send(device, target, torch.zeros(4, device="sim"))
    LOOKS[name](target)


@pytest.mark.parametrize("name", READS)
def test_unwritten_memory_cannot_be_read(device: SimDevice, name: str) -> None:
    with pytest.raises(StaleReadError, match="pinned_empty"):
        READS[name](device.pinned_empty((4,), torch.float32))


def test_nor_can_it_be_copied_to_the_device(device: SimDevice) -> None:
    source = device.pinned_empty((4,), torch.float32)
    source[:2] = 1.0
    device.copy_async(torch.zeros(2, device="sim"), source[:2])
    with pytest.raises(StaleReadError, match="bytes 8 to 16"):
        device.copy_async(torch.zeros(4, device="sim"), source)
    with pytest.raises(StaleReadError, match="bytes 8 to 16"):
        source.tolist()


def test_other_parts_of_the_memory_are_free(device: SimDevice) -> None:
    source, target = pinned(device, [1.0] * 8), torch.zeros(4, device="sim")
    device.copy_async(target, source[:4])
    source[4:] = 2.0
    source[4:].numpy()[0] = 3.0
    assert source[4:].tolist() == [3.0, 2.0, 2.0, 2.0]
    with pytest.raises(RaceError, match="bytes 12 to 16"):
        source[3:] = 2.0


def test_reads_beside_a_queued_read_are_fine(device: SimDevice) -> None:
    source, target = pinned(device, [1.0] * 4), torch.zeros(4, device="sim")
    device.copy_async(target, source)
    assert source.tolist() == [1.0] * 4


def _write_through_a_kept_view(seed: int) -> list[float]:
    device = SimDevice(seed)
    source, target = pinned(device, [1.0, 2.0]), torch.zeros(2, device="sim")
    kept = source.numpy()
    for _ in range(3):
        target.add_(1)
    _send(device, target, source)
    kept[:] = 9.0
    found: list[float] = device.peek(target).tolist()
    return found


def test_a_kept_numpy_view_is_found_out_when_the_copy_runs() -> None:
    """It writes unseen. Where the copy was faster no harm is done, and the values are the old ones."""
    num_found = 0
    for seed in SEEDS:
        try:
            assert _write_through_a_kept_view(seed) == [1.0, 2.0]
        except RaceError as error:
            assert "the host changed pinned memory" in str(error)
            assert marked(_send, "the copy") in str(error)
            num_found += 1
    assert 10 < num_found < len(SEEDS)


def test_before_its_copy_has_run_a_target_does_not_hold_the_old_values() -> None:
    late = 0
    for seed in SEEDS:
        device = SimDevice(seed)
        target = pinned(device, [1.0, 2.0])
        kept, source = target.numpy(), torch.zeros(2, device="sim")
        source.add_(5)
        device.copy_async(target, source)
        assert np.isnan(kept).all() or kept.tolist() == [5.0, 5.0]
        late += bool(np.isnan(kept).all())
        device.drain()
        assert kept.tolist() == [5.0, 5.0]
    assert late > 10


@pytest.mark.parametrize(
    "view",
    [lambda x: x, lambda x: x[1:3], lambda x: x[:, ::2], lambda x: x.t(), lambda x: x[1, 1], lambda x: x[2:2]],
    ids=["all", "rows", "columns", "transposed", "number", "nothing"],
)
def test_views_of_any_shape_go_there_and_back(view: Callable[[Tensor], Tensor]) -> None:
    for seed in range(10):
        device = SimDevice(seed)
        values = torch.randn(3, 4)
        source, back = device.pinned_empty((3, 4), torch.float32), device.pinned_empty((3, 4), torch.float32)
        source.copy_(values)
        back.zero_()
        on_device = torch.zeros(3, 4, device="sim")
        device.copy_async(view(on_device), view(source))
        device.copy_async(view(back), view(on_device))
        device.drain()
        expected = torch.zeros(3, 4)
        view(expected).copy_(view(values))
        assert back.tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool, torch.bfloat16, torch.float64], ids=str)
def test_any_type_goes_there_and_back(device: SimDevice, dtype: torch.dtype) -> None:
    source, back = device.pinned_empty((5,), dtype), device.pinned_empty((5,), dtype)
    source.copy_(torch.tensor([0, 1, 2, 3, 4]).to(dtype))
    on_device = torch.zeros(5, dtype=dtype, device="sim")
    device.copy_async(on_device, source)
    device.copy_async(back, on_device)
    device.drain()
    assert back.tolist() == source.tolist()


def test_copies_convert_nothing(device: SimDevice) -> None:
    source = pinned(device, [1.0, 2.0])
    for target in (torch.zeros(2, dtype=torch.int32, device="sim"), torch.zeros(3, device="sim")):
        with pytest.raises(ValueError, match="copy of"):
            device.copy_async(target, source)


def test_only_pinned_memory_is_copied_late(device: SimDevice) -> None:
    target = torch.zeros(2, device="sim")
    with pytest.raises(SimError, match="must be pinned"):
        device.copy_async(target, torch.ones(2))
    with pytest.raises(SimError, match="must be pinned"):
        device.copy_async(torch.ones(2), target)


@pytest.mark.parametrize("compute", [lambda p: p.clone(), lambda p: p + 1, lambda p: p[torch.tensor([0, 1])]])
def test_what_is_computed_from_pinned_memory_is_not_pinned(device: SimDevice, compute: Any) -> None:
    result = compute(pinned(device, [1.0, 2.0]))
    assert type(result) is Tensor
    with pytest.raises(HostSyncError, match="pageable"):
        torch.zeros(2, device="sim").copy_(result, non_blocking=True)


def test_torch_copies_that_do_not_block_are_late_too(device: SimDevice) -> None:
    source, back = pinned(device, [1.0, 2.0]), pinned(device, [0.0, 0.0])
    target = torch.zeros(2, device="sim")
    target.copy_(source, non_blocking=True)
    on_device = source.to("sim", non_blocking=True) + target
    back.copy_(target, non_blocking=True)
    back.copy_(on_device, non_blocking=True)  # in stream order, so the host has nothing to do with it
    with pytest.raises(RaceError):
        back.tolist()
    with pytest.raises(RaceError):
        source.zero_()
    device.drain()
    assert back.tolist() == [2.0, 4.0]


def test_torch_copies_that_block_are_waits(device: SimDevice) -> None:
    source, target = pinned(device, [1.0, 2.0]), torch.zeros(2, device="sim")
    back = device.pinned_empty((2,), torch.float32)
    with pytest.raises(HostSyncError):
        target.copy_(source)
    with pytest.raises(HostSyncError):
        back.copy_(target)
    with device.sync_guard.allow("build"):
        target.copy_(source)
        source.zero_()  # the values were taken at once
        back.copy_(target)
    assert back.tolist() == [1.0, 2.0]


def test_a_blocking_copy_looks_at_pinned_memory_too(device: SimDevice) -> None:
    source, target = torch.ones(4, device="sim"), pinned(device, [1.0] * 4)
    device.copy_async(target, source)
    with device.sync_guard.allow("build"), pytest.raises(RaceError):
        torch.zeros(4, device="sim").copy_(target)
    with device.sync_guard.allow("build"), pytest.raises(StaleReadError):
        upload(device, device.pinned_empty((4,), torch.float32))
