"""What the engine asks of a device. CPU, CUDA and the simulator answer in the same words.

The engine is written as if every device were asynchronous: work is queued on streams, and the host learns that it is
done from an event, never by looking at memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from slipstream.config import Hardware


class Event(Protocol):
    """A point in a stream's work."""

    def record(self, stream: Stream) -> None: ...

    def query(self) -> bool:
        """Whether the work before the point is done. Does not wait."""
        ...

    def synchronize(self) -> None:
        """Wait on the host. Only ``collect`` may call this."""
        ...


class Stream(Protocol):
    """A queue of device work that runs in order."""

    def wait_event(self, event: Event) -> None:
        """Make later work on this stream wait for the event, on the device."""
        ...


class Graph(Protocol):
    """Recorded device work that one call runs again on the same memory."""

    def replay(self) -> None: ...


class Device(Protocol):
    """One accelerator, or a CPU that plays one."""

    name: str
    torch_device: torch.device
    compute_stream: Stream
    copy_stream: Stream

    def hardware(self, dtype: str) -> Hardware:
        """What this machine has. ``dtype`` is the user's wish: only a risky one is probed, which takes seconds."""
        ...

    def event(self) -> Event: ...

    def use_stream(self, stream: Stream) -> AbstractContextManager[None]:
        """Queue what is launched inside the context on this stream."""
        ...

    def pinned_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that the device can copy from and to while the host goes on."""
        ...

    def copy_async(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy on the current stream. Pinned memory on either side must stay untouched until it has run."""
        ...

    def capture(self, work: Callable[[], None]) -> Graph:
        """Record what ``work`` launches, without running it."""
        ...
