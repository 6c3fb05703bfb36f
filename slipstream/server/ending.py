"""Signals that end a server: the first asks it to finish what is under way, the second to end at once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Ending:
    def __init__(self) -> None:
        self.number = 0  # of the first signal; 0 while there was none
        self.is_urgent = False
        self.on_signal: Callable[[], None] = lambda: None

    def note(self, number: int, _frame: FrameType | None) -> None:
        self.is_urgent = self.number != 0
        self.number = self.number or number
        self.on_signal()


@contextmanager
def noting_signals() -> Iterator[Ending]:
    """Within this context, signals are recorded and do nothing else. In the main thread only."""
    ending = Ending()
    before = {number: signal.signal(number, ending.note) for number in _SIGNALS}
    try:
        yield ending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
