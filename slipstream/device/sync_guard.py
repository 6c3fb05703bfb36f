"""Where the host may synchronise with the device, and a guard that raises everywhere else.

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

# Every phase that may synchronise, and why. ``allow`` accepts no other.
ALLOWED_PHASES: Mapping[str, str] = MappingProxyType(
    {
        "build": "weights, tables and rows are allocated before the first step, while no request waits for a token",
        "capture": "graphs are captured while no request waits for a token, and their warm-up must have ended first",
        "measure": "a step's cost is timed together with capture, while no request waits for a token",
        "collect": "the one wait of the running engine: for the event after a step's output, oldest step first",
    }
)


class HostSyncError(RuntimeError):
    """The host would have synchronised with the device, or read its memory, where it must not."""


class SyncGuard:
    """Whether the host may synchronise now. ``check`` is called by everything that would."""

    def __init__(self, forbidden: bool = False) -> None:
        self.forbidden = forbidden
        self.num_violations = 0

    def forbid(self) -> AbstractContextManager[None]:
        """No synchronisation inside, even where it was allowed outside."""
        return self._set(True)

    def allow(self, phase: str) -> AbstractContextManager[None]:
        if phase not in ALLOWED_PHASES:
            raise ValueError(f"'{phase}' is not among the phases that may synchronise with the device")
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
    """For a CPU, and for a CUDA device whose guard is off: contexts at negligible cost."""

    _nothing: ClassVar[AbstractContextManager[None]] = nullcontext()

    def _set(self, forbidden: bool) -> AbstractContextManager[None]:
        return self._nothing


class CudaSyncGuard(SyncGuard):
    """torch's own detector, and the calls that it does not detect."""

    # Explicit waits are intended as far as torch knows, so its detector does not report them.
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
