"""Where the host may wait for the device, and a guard that raises everywhere else.

Between launch and collect the host only queues work. On the simulated device the guard is always on. On CUDA it is
on in tests and under ``SLIPSTREAM_SYNC_CHECK=1``. On a CPU device memory is host memory, and nothing can wait.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, ClassVar

import torch

# Every place that may wait, and why. ``allow`` takes nothing else.
ALLOWED_PLACES: Mapping[str, str] = MappingProxyType(
    {
        "build": "weights, tables and rows are made before the first step, while nobody waits for a token",
        "capture": "graphs are recorded while nobody waits for a token, and their warm-up must have ended first",
        "measure": "a step's cost is timed where graphs are recorded: when nobody waits for a token",
        "collect": "the one wait of the running engine: for the event behind a step's output, oldest step first",
    }
)


class HostSyncError(RuntimeError):
    """The host would have waited for the device, or read its memory, where it must not."""


class SyncGuard:
    """Whether the host may wait right now. ``check`` is called by whatever would wait."""

    def __init__(self, forbidden: bool = False) -> None:
        self.forbidden = forbidden
        self.num_violations = 0

    def forbid(self) -> AbstractContextManager[None]:
        """No waiting inside, whatever was allowed around it."""
        return self._set(True)

    def allow(self, place: str) -> AbstractContextManager[None]:
        if place not in ALLOWED_PLACES:
            raise ValueError(f"'{place}' is not in the table of places that may wait for the device")
        return self._set(False)

    def _set(self, forbidden: bool) -> AbstractContextManager[None]:
        return self._switched(forbidden)

    @contextmanager
    def _switched(self, forbidden: bool) -> Iterator[None]:
        before = self.forbidden
        self._switch(forbidden)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, forbidden: bool) -> None:
        self.forbidden = forbidden

    def check(self, what: str) -> None:
        if self.forbidden:
            self.num_violations += 1
            raise HostSyncError(f"{what} would make the host wait for the device here")


class NoGuard(SyncGuard):
    """For a CPU, and for a CUDA device whose guard is off: contexts that cost next to nothing."""

    _nothing: ClassVar[AbstractContextManager[None]] = nullcontext()

    def _set(self, forbidden: bool) -> AbstractContextManager[None]:
        return self._nothing


class CudaSyncGuard(SyncGuard):
    """torch's own detector, and the calls that it lets pass."""

    # Waits by name are no surprise to torch, so its detector is silent about them.
    _MISSED: tuple[tuple[Any, str], ...] = (
        (torch.cuda, "synchronize"),
        (torch.cuda.Stream, "synchronize"),
        (torch.cuda.Event, "synchronize"),
        (torch.Tensor, "pin_memory"),
        (torch.cuda, "empty_cache"),
    )

    def __init__(self) -> None:
        super().__init__()
        self._originals: list[tuple[Any, str, Callable[..., Any]]] = []

    def _switch(self, forbidden: bool) -> None:
        if forbidden == self.forbidden:
            return
        self.forbidden = forbidden
        torch.cuda.set_sync_debug_mode("error" if forbidden else "default")
        if forbidden:
            for owner, name in self._MISSED:
                original = getattr(owner, name)
                self._originals.append((owner, name, original))
                setattr(owner, name, self._raising(f"{owner.__name__}.{name}", original))
        else:
            while self._originals:
                owner, name, original = self._originals.pop()
                setattr(owner, name, original)

    def _raising(self, what: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*_args: Any, **_kwargs: Any) -> Any:
            self.check(what)

        return call
