"""A step's results on their way to the host: copied off the compute stream, read when their event is done."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.device.interface import Device, Event
from slipstream.runner.rings import Ring
from slipstream.types import RowStatus, StepPlan, StepResult


@dataclass(slots=True)
class _OutputSlot:
    on_device: Tensor  # [max_reqs, 2] int32: new token or -1, status
    pinned: Tensor  # the same on the host
    computed: Event  # the step has filled on_device
    event: Event  # the copy to pinned is done


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A launched step whose results the host has not read."""

    plan: StepPlan
    slot: _OutputSlot

    def collect(self) -> StepResult:
        """Wait for the step, and read it. The one place where the host waits for the device."""
        self.slot.event.synchronize()
        values = self.slot.pinned[: len(self.plan.requests)].tolist()
        return StepResult(
            plan=self.plan,
            token_ids=[[token] if token >= 0 else [] for token, _ in values],
            statuses=[RowStatus(status) for _, status in values],
        )


class OutputRing:
    """Output slots, one more than steps in flight: a step never writes what an older one still holds."""

    def __init__(self, device: Device, max_reqs: int, depth: int) -> None:
        self._device = device
        shape = (max_reqs, 2)
        self._ring = Ring(
            [
                _OutputSlot(
                    torch.zeros(shape, dtype=torch.int32, device=device.torch_device),
                    device.pinned_empty(shape, torch.int32),
                    device.event(),
                    device.event(),
                )
                for _ in range(depth)
            ]
        )

    def send(self, plan: StepPlan, out: Tensor) -> InFlightStep:
        """Queue the way of ``out`` to the host. ``out`` itself may be overwritten by the next step."""
        device, slot, n = self._device, self._ring.acquire(), out.shape[0]
        slot.on_device[:n].copy_(out)
        slot.computed.record(device.compute_stream)
        with device.use_stream(device.copy_stream):
            device.copy_stream.wait_event(slot.computed)
            device.copy_async(slot.pinned[:n], slot.on_device[:n])
            slot.event.record(device.copy_stream)
        return InFlightStep(plan, slot)
