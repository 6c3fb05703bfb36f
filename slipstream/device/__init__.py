"""Devices with one small interface; ``open_device`` picks one."""

from __future__ import annotations

from slipstream.device.cpu import CpuDevice
from slipstream.device.interface import Device
from slipstream.errors import ConfigError


def choose_device(asked: str) -> str:
    """The name of the device that ``open_device`` opens: cpu, cuda or sim."""
    if asked != "auto":
        return asked
    from slipstream.device.cuda import is_usable  # imports Triton, which a CPU does not need

    return "cuda" if is_usable() else "cpu"


def open_device(asked: str) -> Device:
    name = choose_device(asked)
    if name == "cuda":
        from slipstream.device.cuda import CudaDevice

        return CudaDevice()
    if name == "cpu":
        return CpuDevice()
    if name == "sim":
        from slipstream.device.sim import SimDevice  # registers a device with torch

        return SimDevice()
    raise ConfigError(f"device must be one of auto, cpu, cuda, sim, not '{asked}'")
