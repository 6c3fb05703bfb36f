"""The simulated device waits where a GPU waits, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from slipstream.device.sim import SimDevice
from slipstream.device.sync_guard import HostSyncError
from tests.sync_calls import DOES_NOT_WAIT, WAITS, Inputs, make_inputs


@pytest.fixture
def device() -> SimDevice:
    return SimDevice(1)


@pytest.fixture
def inputs(device: SimDevice) -> Inputs:
    with device.sync_guard.allow("build"):
        return make_inputs(device.torch_device)


@pytest.mark.parametrize("in_inference_mode", [False, True])
@pytest.mark.parametrize("name", WAITS)
def test_calls_that_wait_raise(name: str, inputs: Inputs, in_inference_mode: bool) -> None:
    with torch.inference_mode(in_inference_mode), pytest.raises(HostSyncError, match=r"sync_calls\.py"):
        WAITS[name](inputs)


@pytest.mark.parametrize("in_inference_mode", [False, True])
@pytest.mark.parametrize("name", DOES_NOT_WAIT)
def test_calls_that_do_not_wait_pass(name: str, inputs: Inputs, device: SimDevice, in_inference_mode: bool) -> None:
    with torch.inference_mode(in_inference_mode):
        DOES_NOT_WAIT[name](inputs)
    device.drain()
