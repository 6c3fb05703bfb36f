"""How long the device takes for a step, from what the host sees: when it launched it, and when its results came."""

from __future__ import annotations

import time

_WAITED_S = 2e-5  # a host that did not wait came late, and does not know when the step ended


class StepClock:
    """Told of steps in their order. With steps in flight, a step begins where the one before it ends."""

    def __init__(self, steps_in_flight: int, is_right: bool = True) -> None:
        self._is_alone = steps_in_flight == 1
        self.is_right = is_right  # whether times of the device are known at all
        self._begun: dict[int, float] = {}  # by step
        self._last_end: float | None = None  # of the step before, where it is known

    def launching(self, step_id: int) -> None:
        self._begun[step_id] = time.monotonic()

    def collected(self, step_id: int, wait_s: float) -> float | None:
        """Seconds of the step; None where the host cannot know."""
        now, begun = time.monotonic(), self._begun.pop(step_id)
        if self._is_alone:
            return now - begun
        last_end, self._last_end = self._last_end, now if wait_s > _WAITED_S else None
        if self._last_end is None or last_end is None:
            return None
        return now - max(begun, last_end)

    def forget(self, step_id: int) -> None:
        """The step was not of one piece."""
        self._begun.pop(step_id, None)
        self._last_end = None
