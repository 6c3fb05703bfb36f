"""Whether the engine's process is alive and at work, judged by what it says."""

from __future__ import annotations

# The pulse comes every second from a thread of its own, whatever a step, a recording or the loading of weights takes.
UNWELL_S, HUNG_S = 5.0, 30.0  # of silence: when it is said, and when the process is given up
_FIRST_PULSE_S = 120.0  # the packages are imported before
_LONGEST_PAUSE_S = 2.0  # counted at once


class PulseMonitor:
    """An engine that is at one step for more than ``step_timeout_s`` is taken for hung."""

    def __init__(self, step_timeout_s: float) -> None:
        self._step_timeout_s = step_timeout_s
        self._silent_s = 0.0
        self._stuck_s = 0.0  # of the engine's main thread, as its pulse says
        self._has_pulse = False

    def note_pulse(self, stuck_s: float) -> None:
        self._has_pulse, self._stuck_s = True, stuck_s

    def note_message(self) -> None:
        self._silent_s = 0.0

    def note_silence(self, seconds: float) -> None:
        """Time without a message. After a pause of this process itself the engine had no chance to be heard either."""
        self._silent_s += min(seconds, _LONGEST_PAUSE_S)

    def find_trouble(self, silence_s: float) -> str | None:
        """What says that the process, though alive, does no work; None if nothing does."""
        if self._silent_s > (silence_s if self._has_pulse else _FIRST_PULSE_S):
            return f"the engine process has not answered for {self._silent_s:.0f} s"
        if self._stuck_s > self._step_timeout_s:
            return f"the engine has been at one step for {self._stuck_s:.0f} s"
        return None
