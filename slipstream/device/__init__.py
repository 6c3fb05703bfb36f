"""Devices behind one small interface; ``open_device`` picks one."""

from __future__ import annotations

from slipstream.device.cpu import CpuDevice
from slipstream.device.interface import Device
from slipstream.errors import ConfigError


def choose_device(wish: str) -> str:
    """The name of the device that ``open_device`` opens: cpu, cuda or sim."""
    if wish != "auto":
        return wish
    from slipstream.device.cuda import is_usable  # brings Triton, which a CPU does not want

    return "cuda" if is_usable() else "cpu"


def open_device(wish: str) -> Device:
    name = choose_device(wish)
    if name == "cuda":
        from slipstream.device.cuda import CudaDevice

        return CudaDevice()
    if name == "cpu":
        return CpuDevice()
    if name == "sim":
        from slipstream.device.sim import SimDevice  # registers a device with torch, which only a simulation wants

        return SimDevice()
    raise ConfigError(f"device must be one of auto, cpu, cuda, sim, not '{wish}'")
