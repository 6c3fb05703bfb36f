"""The interface of devices. CPU, CUDA and the simulator implement it.

The engine is written as if every device were asynchronous: work is queued on streams, and the host learns from an event
that it is complete, never by reading memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from slipstream.config import Hardware
from slipstream.device.sync_guard import SyncGuard

# Seconds on the host's monotonic clock. Synchronises with the work before it, so it is read when nothing runs any more.
Timestamp = Callable[[], float]


class Event(Protocol):
    """A point in a stream's work."""

    def record(self, stream: Stream) -> None: ...

    def query(self) -> bool:
        """Whether the work before the point is complete. Does not wait."""
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
    """A capture; its graph exists when the context around it has ended."""

    graph: Graph | None = None


class GraphPool(Protocol):
    """Memory that several graphs share, because they never run at the same time. Opaque to all but its device."""


class Device(Protocol):
    """One accelerator, or a CPU in its role."""

    name: str
    torch_device: torch.device
    compute_stream: Stream
    copy_stream: Stream
    sync_guard: SyncGuard
    keeps_time: bool  # host wait times are meaningful
    runs_beside: bool  # runs asynchronously to the host
    repeats_launches: bool  # launches are calls from Python; ``record_launches`` saves their time

    def hardware(self, dtype: str) -> Hardware:
        """What this machine has. ``dtype`` is the requested type: only a risky one is probed, which takes seconds."""
        ...

    def event(self) -> Event: ...

    def timestamp(self) -> Timestamp | None:
        """The time at which the current stream gets here, to be read later; None if host and device run in step."""
        ...

    def seconds_of(self, run: Callable[[], None]) -> float:
        """The duration by the device's own clock. Synchronises; for idle times."""
        ...

    def memory_in_use(self) -> int:
        """Device memory in use, in bytes; 0 if it is not counted."""
        ...

    def use_stream(self, stream: Stream) -> AbstractContextManager[None]:
        """Queue what is launched inside the context on this stream."""
        ...

    def pinned_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that the device can copy from and to asynchronously."""
        ...

    def copy_async(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy on the current stream. Pinned memory on either side must not change until the copy has run."""
        ...

    def poison(self, tensor: torch.Tensor) -> None:
        """Queue an overwrite with values that no computation yields, so that a stale read is detected."""
        ...

    def graph_pool(self) -> GraphPool: ...

    def warm_up(self) -> AbstractContextManager[None]:
        """Context of the run before a capture. Ends when the device has finished it."""
        ...

    def record(self, pool: GraphPool) -> AbstractContextManager[Capture]:
        """Capture what is launched inside the context on the current stream, without running it."""
        ...

    def record_launches(self) -> AbstractContextManager[Capture]:
        """Record what is launched inside the context by this thread, while it runs.

        There is no graph in the end if it depends on what only the host knows.
        """
        ...
