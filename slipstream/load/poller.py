"""Readiness of many file descriptors: epoll where available, else ``selectors``."""

from __future__ import annotations

import select
import selectors
import sys
from collections.abc import Sequence
from typing import Protocol

READ, WRITE = 1, 4  # epoll's values; errors and hang-ups are other bits


class Poller(Protocol):
    """The methods that a client needs; epoll's object has them."""

    def register(self, fd: int, eventmask: int, /) -> None: ...
    def modify(self, fd: int, eventmask: int, /) -> None: ...
    def unregister(self, fd: int, /) -> None: ...
    def poll(self, timeout: float, /) -> Sequence[tuple[int, int]]: ...
    def close(self) -> None: ...


class SelectorPoller:
    """For systems without epoll."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def register(self, fd: int, eventmask: int, /) -> None:
        self._selector.register(fd, _selector_mask(eventmask))

    def modify(self, fd: int, eventmask: int, /) -> None:
        self._selector.modify(fd, _selector_mask(eventmask))

    def unregister(self, fd: int, /) -> None:
        self._selector.unregister(fd)

    def poll(self, timeout: float, /) -> Sequence[tuple[int, int]]:
        ready = self._selector.select(timeout)
        return [
            (key.fd, (READ if mask & selectors.EVENT_READ else 0) | (WRITE if mask & selectors.EVENT_WRITE else 0))
            for key, mask in ready
        ]

    def close(self) -> None:
        self._selector.close()


def make_poller() -> Poller:
    if sys.platform == "linux":
        return select.epoll()
    return SelectorPoller()


def _selector_mask(mask: int) -> int:
    read = selectors.EVENT_READ if mask & READ else 0
    return read | (selectors.EVENT_WRITE if mask & WRITE else 0)
