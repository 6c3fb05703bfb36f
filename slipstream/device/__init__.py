"""Devices behind one small interface; ``open_device`` picks one."""

from __future__ import annotations

from slipstream.device.cpu import CpuDevice
from slipstream.device.interface import Device
from slipstream.errors import ConfigError


def open_device(name: str) -> Device:
    if name in ("auto", "cuda"):
        from slipstream.device.cuda import CudaDevice, is_usable  # brings Triton, which a CPU does not want

        if name == "cuda" or is_usable():
            return CudaDevice()
    if name in ("auto", "cpu"):
        return CpuDevice()
    if name == "sim":
        from slipstream.device.sim import SimDevice  # registers a device with torch, which only a simulation wants

        return SimDevice()
    raise ConfigError(f"device must be one of auto, cpu, cuda, sim, not '{name}'")
