"""Rings of buffers that host and device share. No slot is reused while a copy may still access it."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from slipstream.device.interface import Event


class Slot(Protocol):
    event: Event  # complete when the device no longer needs the slot's memory


S = TypeVar("S", bound=Slot)


class Ring(Generic[S]):
    """Slots used in turn. The ring is deeper than the number of steps in flight, so the next slot is always free."""

    def __init__(self, slots: list[S]) -> None:
        self.slots = slots
        self._next_idx = 0

    def acquire(self) -> S:
        slot = self.slots[self._next_idx]
        # Waiting here would hide a missing collect; a full ring is a bug of the engine.
        if not slot.event.query():
            raise RuntimeError(f"ring of {len(self.slots)} slots is full: a step was launched without a collect")
        self._next_idx = (self._next_idx + 1) % len(self.slots)
        return slot
