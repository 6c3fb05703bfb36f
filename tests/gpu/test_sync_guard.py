"""The guard on a real GPU, and the table of calls that wait, which the simulated device goes by."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from slipstream.device.sync_guard import CudaSyncGuard, HostSyncError
from tests.sync_calls import DOES_NOT_WAIT, WAITS, Inputs, make_inputs

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    made = make_inputs(torch.device("cuda"))
    torch.cuda.synchronize()
    return made


@pytest.fixture
def guard() -> Iterator[CudaSyncGuard]:
    made = CudaSyncGuard()
    yield made
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", WAITS)
def test_calls_that_wait_raise(name: str, inputs: Inputs, guard: CudaSyncGuard) -> None:
    with guard.forbid(), pytest.raises((RuntimeError, HostSyncError)):
        WAITS[name](inputs)


@pytest.mark.parametrize("name", DOES_NOT_WAIT)
def test_calls_that_do_not_wait_pass(name: str, inputs: Inputs, guard: CudaSyncGuard) -> None:
    DOES_NOT_WAIT[name](inputs)  # once outside: a first call may load and allocate
    with guard.forbid():
        DOES_NOT_WAIT[name](inputs)


def test_waits_by_name_raise_and_are_restored(guard: CudaSyncGuard) -> None:
    stream, event = torch.cuda.current_stream(), torch.cuda.Event()
    event.record()
    waits = (torch.cuda.synchronize, stream.synchronize, event.synchronize, torch.ones(2).pin_memory)
    with guard.forbid():
        for wait in (torch.cuda.synchronize, stream.synchronize, event.synchronize, torch.ones(2).pin_memory):
            with pytest.raises(HostSyncError):
                wait()
        with guard.allow("collect"):
            event.synchronize()
            assert torch.ones(1, device="cuda").item() == 1
        with pytest.raises(HostSyncError):
            event.synchronize()
    for wait in waits:
        wait()


def test_copies_of_pinned_memory_do_not_wait(guard: CudaSyncGuard) -> None:
    pinned, on_device = torch.ones(4).pin_memory(), torch.zeros(4, device="cuda")
    with guard.forbid():
        on_device.copy_(pinned, non_blocking=True)
        pinned.copy_(on_device, non_blocking=True)
