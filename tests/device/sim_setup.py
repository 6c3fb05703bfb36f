"""What the tests of the simulated device have in common: uploads, order between streams, and marked source lines."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.device.interface import Event, Stream
from slipstream.device.sim import SimDevice

SEEDS = range(50)


def upload(device: SimDevice, tensor: Tensor) -> Tensor:
    with device.sync_guard.allow("build"):
        return tensor.to(device.torch_device)


def pinned(device: SimDevice, values: list[float]) -> Tensor:
    made = device.pinned_empty((len(values),), torch.float32)
    made.copy_(torch.tensor(values))
    return made


def event_on(device: SimDevice, stream: Stream) -> Event:
    event = device.event()
    event.record(stream)
    return event


def order(device: SimDevice, before: Stream, after: Stream) -> None:
    after.wait_event(event_on(device, before))


def marked(function: Callable[..., Any], mark: str) -> str:
    """The file and line in a function that ends with a comment, as errors name it."""
    lines, first = inspect.getsourcelines(function)
    (offset,) = (i for i, line in enumerate(lines) if line.rstrip().endswith(f"# {mark}"))
    return f"{Path(inspect.getfile(function)).name}:{first + offset}"
