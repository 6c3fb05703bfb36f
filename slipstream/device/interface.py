"""What the engine asks of a device. CPU, CUDA and the simulator answer in the same words.

The engine is written as if every device were asynchronous: work is queued on streams, and the host learns that it is
done from an event, never by looking at memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from slipstream.config import Hardware
from slipstream.device.sync_guard import SyncGuard

# Seconds on the host's monotonic clock. Waits for the work before it, so it is asked for when nothing runs any more.
Timestamp = Callable[[], float]


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


@dataclass(slots=True)
class Capture:
    """A recording; its graph is there when the context around it has ended."""

    graph: Graph | None = None


class GraphPool(Protocol):
    """Memory that several graphs share, because they never run at the same time. Opaque to everybody but its device."""


class Device(Protocol):
    """One accelerator, or a CPU that plays one."""

    name: str
    torch_device: torch.device
    compute_stream: Stream
    copy_stream: Stream
    sync_guard: SyncGuard
    keeps_time: bool  # how long the host waits for it means something
    runs_beside: bool  # it computes while the host goes on, step after step

    def hardware(self, dtype: str) -> Hardware:
        """What this machine has. ``dtype`` is the user's wish: only a risky one is probed, which takes seconds."""
        ...

    def event(self) -> Event: ...

    def timestamp(self) -> Timestamp | None:
        """When the current stream gets here, to be asked for later; None where host and device are in step."""
        ...

    def seconds_of(self, run: Callable[[], None]) -> float:
        """How long it takes, by the device's own clock. Waits; for when nothing else runs."""
        ...

    def memory_in_use(self) -> int:
        """Bytes of the device's memory that somebody has; 0 where nobody counts them."""
        ...

    def use_stream(self, stream: Stream) -> AbstractContextManager[None]:
        """Queue what is launched inside the context on this stream."""
        ...

    def pinned_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that the device can copy from and to while the host goes on."""
        ...

    def copy_async(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy on the current stream. Pinned memory on either side must stay untouched until it has run."""
        ...

    def poison(self, tensor: torch.Tensor) -> None:
        """Queue an overwrite with values no computation yields, so that a read of what a step did not write shows."""
        ...

    def graph_pool(self) -> GraphPool: ...

    def warm_up(self) -> AbstractContextManager[None]:
        """Around the run before a recording. Ends when the device has finished it."""
        ...

    def record(self, pool: GraphPool) -> AbstractContextManager[Capture]:
        """Record what is launched inside the context on the current stream, without running it."""
        ...
