from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.device import open_device
from slipstream.device.cpu import CpuDevice, dtype_works, free_memory_bytes
from slipstream.errors import ConfigError


def test_the_interface_on_a_cpu() -> None:
    device = CpuDevice()
    event = device.event()
    event.record(device.compute_stream)
    device.copy_stream.wait_event(event)
    assert event.query()
    pinned = device.pinned_empty((2,), torch.int32)
    with device.use_stream(device.copy_stream):
        device.copy_async(pinned, torch.tensor([1, 2], dtype=torch.int32))
    assert pinned.tolist() == [1, 2]
    device.poison(pinned)
    assert pinned.tolist() == [0x7FF17FF1] * 2
    with device.warm_up(), device.sync_guard.forbid():
        assert pinned[0] != 0, "nothing waits on a CPU"
    for graphs in (device.graph_pool, lambda: device.record(object()).__enter__()):
        with pytest.raises(RuntimeError, match="no graphs"):
            graphs()


def test_open_device() -> None:
    assert open_device("auto").name == "cpu"
    with pytest.raises(ConfigError, match="device must be one of"):
        open_device("abacus")


def test_memory_is_plausible() -> None:
    assert 2**26 < free_memory_bytes() < 2**50


@pytest.mark.parametrize(("code", "works"), [(0, True), (-4, False)])
def test_a_type_that_kills_the_child_does_not_work(monkeypatch: pytest.MonkeyPatch, code: int, works: bool) -> None:
    """Minus four is an illegal instruction: what AMX does on some virtual machines."""

    def fake_run(*args: Any, **kwargs: Any) -> Any:
        return SimpleNamespace(returncode=code)

    dtype_works.cache_clear()
    monkeypatch.setattr(subprocess, "run", fake_run)
    assert dtype_works("bfloat16") is works
    dtype_works.cache_clear()


def test_safe_types_are_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    assert dtype_works("float32") and dtype_works("auto")
