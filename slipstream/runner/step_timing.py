"""How long a step takes, when nothing else runs."""

from __future__ import annotations

from collections.abc import Callable

from slipstream.device.interface import Device

_AT_WORK_S, _MOST_AT_WORK = 0.05, 25  # steps one after the other, on a device of its own
_NUM_ALONE, _LONG_S = 5, 0.01  # the same elsewhere; a longer step is timed by itself


class _Interrupted(Exception):  # noqa: N818  not an error
    """There is better to do."""


def seconds_of_a_step(
    device: Device, run: Callable[[], None], is_wanted: Callable[[], bool] = lambda: False
) -> float | None:
    """None if the timing gave way to something else, which ``is_wanted`` is asked for after each run."""

    def run_unless_wanted() -> None:
        if is_wanted():
            raise _Interrupted
        run()

    try:
        run_unless_wanted()  # once for everything that is done once
        return _at_work(device, run_unless_wanted) if device.runs_beside else _alone(device, run_unless_wanted)
    except _Interrupted:
        return None


def _at_work(device: Device, run: Callable[[], None]) -> float:
    """Of one step among many: a GPU that computes soon lowers its clocks."""
    seconds = _of_each(device, run, 1)
    for _ in range(2):  # the first time is for its clocks
        seconds = _of_each(device, run, max(1, min(round(_AT_WORK_S / seconds), _MOST_AT_WORK)))
    return seconds


def _alone(device: Device, run: Callable[[], None]) -> float:
    """One time and another, for a CPU may have others to serve."""
    seconds = _of_each(device, run, 1)
    if seconds < _LONG_S:
        return _of_each(device, run, _NUM_ALONE)
    return min(seconds, *(_of_each(device, run, 1) for _ in range(2)))


def _of_each(device: Device, run: Callable[[], None], count: int) -> float:
    def run_all() -> None:
        for _ in range(count):
            run()

    return device.seconds_of(run_all) / count
