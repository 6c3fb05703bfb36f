"""Streams, events, and the pace at which queued work runs.

Nothing runs by itself: each call of the host lets the device run a random amount of queued work, on a random stream. So
the device may lag far, run in step, or be starved on one stream, and a seed replays it exactly.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from slipstream.device.sim.check import (
    HOST,
    CaptureError,
    DeviceFaultError,
    Region,
    SimError,
    Site,
    call_site,
    join,
    touch,
)

if TYPE_CHECKING:
    from slipstream.device.sim.device import SimDevice

_RATES = (0.0, 0.3, 1.0, 3.0, 50.0)  # operations per call of the host
_SPEEDS = (1.0, 1.0, 1.0, 0.01)  # of a stream relative to the others


class Op(NamedTuple):
    """Queued work: what to run, and the memory it touches."""

    run: Callable[[], None]
    site: Site
    regions: Sequence[Region]


class _Wait(NamedTuple):
    stream: Stream
    time: int


class Stream:
    def __init__(self, device: SimDevice, idx: int) -> None:
        self.device = device
        self.idx = idx
        self.queue: deque[Op | _Wait] = deque()
        self.num_queued = 0
        self.num_done = 0
        self.clock: list[int] = []

    def push(self, op: Op) -> None:
        """Queue an operation. It is ordered after everything that the host knows to be complete."""
        time = self.num_queued + 1
        join(self.clock, self.device.clock)
        self.clock[self.idx] = time
        for region in op.regions:
            touch(region, self.idx, time, self.clock, op.site)
        self.num_queued = time
        self.queue.append(op)

    def wait_event(self, event: object) -> None:
        assert isinstance(event, Event)
        if self.device.recording is not None:
            raise CaptureError(f"{call_site('wait_event')}: a graph of one stream cannot wait for another")
        if event.stream is not None and event.stream is not self:
            self.queue.append(_Wait(event.stream, event.time))
            join(self.clock, event.clock)

    @property
    def is_ready(self) -> bool:
        """Whether the next operation can run; waits that are over are removed."""
        while self.queue:
            head = self.queue[0]
            if isinstance(head, Op):
                return True
            if head.stream.num_done < head.time:
                return False
            self.queue.popleft()
        return False

    def run_next(self) -> None:
        op = self.queue.popleft()
        assert isinstance(op, Op)
        run_all([op])
        self.num_done += 1


def run_all(ops: Sequence[Op]) -> None:
    try:
        for op in ops:
            op.run()
    except SimError:
        raise
    except Exception as error:
        raise DeviceFaultError(f"{op.site} failed on the device: {type(error).__name__}: {error}") from error


def _nothing() -> None:
    pass


class Event:
    def __init__(self, device: SimDevice) -> None:
        self._device = device
        self.stream: Stream | None = None
        self.time = 0
        self.clock: list[int] = []

    def record(self, stream: object) -> None:
        assert isinstance(stream, Stream)
        if self._device.recording is not None:
            raise CaptureError(f"{call_site('record')}: the host cannot see an event inside a graph")
        if stream.queue and isinstance(stream.queue[-1], _Wait):
            # Waits have no time of their own. An empty operation after the wait does, so that the event follows both.
            stream.push(Op(_nothing, call_site("record"), ()))
        self.stream, self.time, self.clock = stream, stream.num_queued, list(stream.clock)

    def query(self) -> bool:
        if self._device.recording is not None:
            raise CaptureError(f"{call_site('query')}: no event can be queried during capture")
        self._device.tick()
        if self.stream is not None and self.stream.num_done < self.time:
            return False
        join(self._device.clock, self.clock)
        return True

    def synchronize(self) -> None:
        if self._device.recording is not None:
            raise CaptureError(f"{call_site('synchronize')}: the host cannot wait during capture")
        self._device.sync_guard.check(str(call_site("Event.synchronize")))
        self._device.raise_late_error()
        if self.stream is not None:
            self._device.pace.run_until(self.stream, self.time)
        join(self._device.clock, self.clock)


class Pace:
    """Decides how much queued work runs, and where, from a seed."""

    def __init__(self, streams: list[Stream], seed: int) -> None:
        self._streams = streams
        self._random = random.Random(seed)
        self._left = 0
        self._rate = 0.0
        self._credit = 0.0
        self._speeds: list[float] = []
        self._running = False

    def tick(self) -> None:
        if self._left <= 0:
            self._left = self._random.randrange(10, 200)
            self._rate = self._random.choice(_RATES)
            self._speeds = [self._random.choice(_SPEEDS) for _ in self._streams]
        self._left -= 1
        self._credit += self._rate
        while self._credit >= 1.0:
            self._credit -= 1.0
            if not self._run_one():
                self._credit = 0.0

    def run_until(self, stream: Stream, time: int) -> None:
        while stream.num_done < time:
            if not self._run_one():
                raise SimError("the device is stuck: every stream waits for an event that nothing will reach")

    def drain(self) -> None:
        while self._run_one():
            pass

    def _run_one(self) -> bool:
        ready = [stream for stream in self._streams if stream.is_ready]
        if not ready or self._running:
            return False
        stream = ready[0]
        if len(ready) > 1:
            weights = [self._speeds[s.idx - 1] if s.idx <= len(self._speeds) else 1.0 for s in ready]
            stream = self._random.choices(ready, weights)[0]
        # Device work runs outside the host's current modes: its memory must not become an inference tensor.
        self._running = True
        try:
            with torch.inference_mode(False), torch.no_grad():
                stream.run_next()
        finally:
            self._running = False
        return True


__all__ = ["HOST", "Event", "Op", "Pace", "Stream"]
