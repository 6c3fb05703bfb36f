"""A client's connection to the engine's process: requests go out, updates come in.

It is read by its owner: from a thread (``process.py``) or from an event loop that watches its descriptor. ``deliver``
is called in the thread that reads. Requests may be sent from any thread.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

import zmq

from slipstream.engine.build import EngineInfo
from slipstream.engine.driver import Add, Deliver, Finish
from slipstream.engine.pulse import UNWELL_S, PulseMonitor
from slipstream.engine.stats import EngineStats
from slipstream.engine.supervisor import close_context, open_pull, open_push
from slipstream.engine.wire import (
    EngineBack,
    EngineLost,
    Pulse,
    Ready,
    RestartFailed,
    Stats,
    client_address,
    client_prefix,
    decode,
    encode,
    engine_address,
)
from slipstream.errors import EngineError
from slipstream.output import TokenUpdate, TokenUpdates
from slipstream.request import Request
from slipstream.text.tokenizer import Tokenizer

_RESTARTING = "the engine is being restarted; try again in a moment"


@dataclass(frozen=True)
class LinkAddress:
    """Which client this is, and where to find its engine."""

    folder: str  # of the sockets
    client: int
    generation: int  # of the engine that runs at the start
    step_timeout_s: float
    incarnation: int = 0  # earlier starts of this client
    is_ready: bool = True  # whether that engine takes requests
    num_restarts: int = 0  # before this client started, and what those engines had counted
    num_sync_violations: int = 0


class EngineLink:
    def __init__(self, address: LinkAddress, ready: Ready, tokenizer: Tokenizer, deliver: Deliver) -> None:
        self._address = address
        self._tokenizer = tokenizer
        self._deliver = deliver
        self.id_prefix = client_prefix(address.client, address.incarnation)
        self._lock = threading.Lock()
        self.known: set[str] = set()  # requests that have not ended here
        self._failure: str | None = None
        self._stats = EngineStats(num_sync_violations=address.num_sync_violations)
        self._violations_before = address.num_sync_violations  # of engines that have ended
        self.num_restarts = address.num_restarts
        self._generation = address.generation
        self._monitor = PulseMonitor(address.step_timeout_s)
        self._monitor.note_pulse(0.0)  # it has reported ready
        self._noted_at = time.monotonic()
        self._context = zmq.Context()
        self._inbox = open_pull(self._context, client_address(address.folder, address.client))
        self._outbox = open_push(self._context, engine_address(address.folder, address.generation))
        self._info = self._describe(ready)
        self._is_ready = address.is_ready

    def _describe(self, ready: Ready) -> EngineInfo:
        return EngineInfo(
            ready.config, self._tokenizer, ready.defaults, ready.eos_token_ids, ready.pooling, ready.model_path
        )

    @property
    def info(self) -> EngineInfo:
        """Of the engine that runs now: a restarted one may have found less memory, and have other limits."""
        return self._info

    @property
    def stats(self) -> EngineStats:
        return self._stats

    @property
    def is_ready(self) -> bool:
        """Whether requests can be taken now; false while a dead engine process is replaced."""
        return self._is_ready

    @property
    def trouble(self) -> str | None:
        """Why requests cannot be taken or answered now; None if they can."""
        if not self._is_ready:
            return self._failure or _RESTARTING
        return self._monitor.find_trouble(UNWELL_S)

    @property
    def descriptor(self) -> int:
        """Becomes readable when messages come. Edge-triggered: call ``read`` until it returns false."""
        return int(self._inbox.getsockopt(zmq.FD))

    def wait(self, timeout_ms: int) -> None:
        self._inbox.poll(timeout_ms)

    def read(self, most: int) -> bool:
        """Handle up to ``most`` messages. Returns whether there may be more."""
        for _ in range(most):
            try:
                frames = self._inbox.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._monitor.note_message()
            self.handle(decode(frames))
        return True

    def note_time(self) -> None:
        """Called about every second, after ``read``: counts the time without a message, if none came."""
        now = time.monotonic()
        self._monitor.note_silence(now - self._noted_at)
        self._noted_at = now

    def add(self, request: Request) -> None:
        with self._lock:
            if not self._is_ready:
                raise EngineError(self.trouble or _RESTARTING)
            self._outbox.send_multipart(encode(Add(request)))
            self.known.add(request.request_id)

    def finish(self, request_id: str) -> None:
        with self._lock:
            self.known.discard(request_id)
            if self._is_ready:
                self._outbox.send_multipart(encode(Finish(request_id)))

    def close(self) -> None:
        """End every request that is still known; nothing is sent or read any more."""
        with self._lock:
            self._is_ready = False
            close_context(self._context)
        self._end_all("the engine was closed")

    def handle(self, message: Any) -> None:
        if isinstance(message, TokenUpdates):
            if message.others:
                with self._lock:
                    self.known.difference_update(message.ended)
            self._deliver(message)
        elif isinstance(message, Stats):
            message.stats.num_sync_violations += self._violations_before
            self._stats = message.stats
        elif isinstance(message, Pulse):
            self._monitor.note_pulse(message.stuck_s)
        elif isinstance(message, EngineLost):
            self._lose_engine(message)
        elif isinstance(message, RestartFailed):
            self._failure = message.reason
        elif isinstance(message, EngineBack):
            self._take_new_engine(message)

    def _lose_engine(self, message: EngineLost) -> None:
        if message.generation < self._generation:
            return  # it was lost before this client started
        with self._lock:
            self._is_ready, self._failure = False, None
        self._violations_before = message.num_sync_violations
        self._stats = EngineStats(num_sync_violations=message.num_sync_violations)
        self._end_all(f"{message.reason}; it is being restarted, send the request again")

    def _take_new_engine(self, message: EngineBack) -> None:
        if self._is_ready and message.generation == self._generation:
            return  # known since this client started
        with self._lock:
            self._outbox.close()
            self._outbox = open_push(self._context, engine_address(self._address.folder, message.generation))
            self._info = self._describe(message.ready)
            self._monitor = PulseMonitor(self._address.step_timeout_s)
            self._monitor.note_pulse(0.0)
            self._generation, self.num_restarts = message.generation, message.num_restarts
            self._is_ready, self._failure = True, None

    def _end_all(self, reason: str) -> None:
        with self._lock:
            lost, self.known = sorted(self.known), set()
        if lost:
            # Not the requests' fault, hence "abort" and not "error".
            now = time.monotonic()
            self._deliver(TokenUpdates.from_list([TokenUpdate(i, [], "abort", error=reason, time=now) for i in lost]))
