"""An asynchronous accelerator on the CPU, for proofs: poisoned, checked, and replayed from a seed."""

from __future__ import annotations

from slipstream.device.sim.check import CaptureError, DeviceFaultError, RaceError, SimError, StaleReadError
from slipstream.device.sim.device import SimDevice
from slipstream.device.sim.tensor import SimTensor

__all__ = ["CaptureError", "DeviceFaultError", "RaceError", "SimDevice", "SimError", "SimTensor", "StaleReadError"]
