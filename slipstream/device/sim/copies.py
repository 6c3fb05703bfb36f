"""Copies that run later than they are queued."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream.device.sim.check import RaceError, call_site
from slipstream.device.sim.memory import poison
from slipstream.device.sim.pinned import plain
from slipstream.device.sim.queue import Op
from slipstream.device.sim.tensor import SimTensor

if TYPE_CHECKING:
    from slipstream.device.sim.device import SimDevice


def late_copy(device: SimDevice, target: Tensor, source: Tensor) -> Op:
    """A copy between memory of the device and pinned memory."""
    values, into = (t.memory if isinstance(t, SimTensor) else plain(t) for t in (source, target))
    touched = (device.region(source, writes=False), device.region(target, writes=True))
    regions = [region for region in touched if region is not None]
    if values.shape != into.shape or values.dtype != into.dtype:
        raise ValueError(f"copy of {tuple(values.shape)} {values.dtype} into {tuple(into.shape)} {into.dtype}")
    site = call_site("copy_async")
    if not isinstance(target, SimTensor):
        if device.recording is None:
            poison(into)  # a host read before the copy has run must not see the old content
        return Op(lambda: copy_announced(into, values), site, regions)
    # A numpy view of the memory can write unobserved; the copy then finds that the memory has changed.
    is_watched = not isinstance(source, SimTensor) and device.recording is None
    expected = _bytes(values).clone() if is_watched else None

    def run() -> None:
        if expected is not None and not torch.equal(expected, _bytes(values)):
            raise RaceError(f"the host changed {regions[0].block} before the copy queued by {site} had read it")
        into.copy_(values)

    return Op(run, site, regions)


def copy_announced(into: Tensor, values: Tensor) -> None:
    """Results must have the announced spec: a copy that converts or broadcasts would hide a mistake."""
    if into.shape != values.shape or into.dtype != values.dtype:
        found, announced = (f"{tuple(t.shape)} {t.dtype}" for t in (values, into))
        raise ValueError(f"the result is {found}, announced was {announced}")
    into.copy_(values)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
