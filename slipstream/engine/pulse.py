"""Whether the engine's process is alive and making progress, judged by its messages."""

from __future__ import annotations

# The process sends a pulse every second from its own thread, even during a long step, a capture or loading.
UNWELL_S, HUNG_S = 5.0, 30.0  # seconds of silence: before it is reported, and before the process is replaced
_FIRST_PULSE_S = 120.0  # importing the packages takes long
_LONGEST_PAUSE_S = 2.0  # counted for one call of note_silence


class PulseMonitor:
    """An engine whose step takes longer than ``step_timeout_s`` counts as hung."""

    def __init__(self, step_timeout_s: float) -> None:
        self._step_timeout_s = step_timeout_s
        self._silent_s = 0.0
        self._stuck_s = 0.0  # of the engine's main thread, as its pulse reports
        self._has_pulse = False

    def note_pulse(self, stuck_s: float) -> None:
        self._has_pulse, self._stuck_s = True, stuck_s

    def note_message(self) -> None:
        self._silent_s = 0.0

    def note_silence(self, seconds: float) -> None:
        """Time without a message. Limited, since a pause of this process itself says nothing about the engine."""
        self._silent_s += min(seconds, _LONGEST_PAUSE_S)

    def find_trouble(self, silence_s: float) -> str | None:
        """The reason to consider the process hung although it is alive; None if there is none."""
        if self._silent_s > (silence_s if self._has_pulse else _FIRST_PULSE_S):
            return f"the engine process has not answered for {self._silent_s:.0f} s"
        if self._stuck_s > self._step_timeout_s:
            return f"the engine has been at one step for {self._stuck_s:.0f} s"
        return None
