"""Whether other processes used part of the machine while something was measured.

Threads that wait for each other at every layer lose far more than the share that others take: on two cores one busy
stranger can cost a factor of ten, and not the same factor to every program. Such a measurement is taken again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from slipstream.commands.machine import num_cores

_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
T = TypeVar("T")


class Quiet:
    """Measures again, at most ``tries`` times, while others take over ``limit`` of the cores; keeps the quietest."""

    def __init__(self, limit: float, tries: int, pause_s: float = 5.0) -> None:
        self._limit, self._tries, self._pause_s = limit, tries, pause_s
        self.shares: list[float] = []  # of all that was kept

    def __call__(self, measure: Callable[[], T]) -> T:
        found: list[tuple[float, T]] = []
        while len(found) < self._tries:
            if found:
                time.sleep(self._pause_s)
            begun, busy, own = time.perf_counter(), _busy_s(), _own_s()
            value = measure()
            others = (_busy_s() - busy) - (_own_s() - own)
            share = others / (num_cores() * (time.perf_counter() - begun))
            found.append((max(0.0, share), value))
            if share <= self._limit:
                break
        share, value = min(found, key=lambda pair: pair[0])
        self.shares.append(share)
        return value


def busy_ticks(stat: str) -> int:
    """Of /proc/stat: all processors together, all but idle and waiting; time stolen by the host included."""
    user, nice, system, _, _, irq, soft_irq, steal = map(int, stat.split("\n")[0].split()[1:9])
    return user + nice + system + irq + soft_irq + steal


def process_ticks(stat: str) -> tuple[int, int]:
    """Of /proc/PID/stat: the parent's number, and time in the program and in the system."""
    fields = stat[stat.rindex(")") + 2 :].split()  # a name may hold spaces
    return int(fields[1]), int(fields[11]) + int(fields[12])


def _busy_s() -> float:
    stat = _PROC / "stat"
    return busy_ticks(stat.read_text()) / _TICKS if stat.exists() else 0.0


def _own_s() -> float:
    """This process, its children that have ended, and those that live."""
    times, total = os.times(), 0.0
    for path in _PROC.glob("[0-9]*/stat"):
        try:
            parent, ticks = process_ticks(path.read_text())
        except OSError:  # it has ended
            continue
        total += ticks / _TICKS if parent == os.getpid() else 0.0
    return total + times.user + times.system + times.children_user + times.children_system
