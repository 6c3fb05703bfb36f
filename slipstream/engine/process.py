"""The engine in a process of its own, watched: HTTP and tokenising never delay a step, and a crash is not the end.

If the process dies, every request it had learns so at once, and another one is started. Sockets live in a folder that
only this user can enter.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

from slipstream import errors
from slipstream.config import EngineOptions, child_environment
from slipstream.engine.build import EngineInfo
from slipstream.engine.driver import Add, Deliver, Finish, Stop
from slipstream.engine.stats import EngineStats
from slipstream.engine.wire import Ready, Refused, Stats, decode, encode
from slipstream.errors import EngineError, SlipstreamError
from slipstream.models.hub import resolve_models
from slipstream.models.weights import open_checkpoint
from slipstream.types import Request, TokenUpdate, TokenUpdates

logger = logging.getLogger("slipstream.engine")

_POLL_MS = 50  # how soon a death is noticed
_STOP_S = 5.0
_LONGEST_PAUSE_S = 60.0  # between tries to restart it


class _Child:
    """One engine process and its two sockets."""

    def __init__(self, options: EngineOptions) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="slipstream-"))  # mode 0700
        self._context = zmq.Context()
        self._outbox = self._context.socket(zmq.PUSH)
        self._inbox = self._context.socket(zmq.PULL)
        for socket, name in ((self._outbox, "in"), (self._inbox, "out")):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)  # the queue limit is the server's business
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.bind(f"ipc://{self._folder}/{name}")
        self._lock = threading.Lock()
        # The worker compares its parent with this one, and ends when it has another.
        command = [sys.executable, "-m", "slipstream.engine.worker", str(self._folder), str(os.getpid())]
        # torch's own pool must not spin on the cores that the C kernels' threads need next.
        environment = child_environment(OMP_WAIT_POLICY="passive")
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # died at once: whoever waits for it will see
            self.process.stdin.write(msgspec.json.encode(options))
            self.process.stdin.close()

    def send(self, message: Any) -> bool:
        """Whether the message is on its way. Never waits: a process that is dead or not there yet takes nothing."""
        with self._lock:
            if self._outbox.closed:
                return False
            try:
                self._outbox.send_multipart(encode(message), flags=zmq.NOBLOCK)
            except zmq.Again:
                return False
            return True

    def receive(self) -> Any:
        """The next message, or None if none came for a moment."""
        return decode(self._inbox.recv_multipart()) if self._inbox.poll(_POLL_MS) else None

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def end(self, timeout_s: float = 0.0) -> None:
        """Let the process end by itself for a while, then make it."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        with self._lock:
            self._context.destroy()
        shutil.rmtree(self._folder, ignore_errors=True)


class EngineProcess:
    """A ``RunningEngine`` whose core is elsewhere. ``deliver`` is called from a thread of its own."""

    def __init__(self, options: EngineOptions, deliver: Deliver) -> None:
        # Fetched here, where progress can be shown; the process finds it in the cache.
        self._options = resolve_models(options)
        self._deliver = deliver
        self._known: set[str] = set()
        self._lock = threading.Lock()
        self._closing = False
        self._pause = threading.Event()  # set to end a pause early
        self._failure: str | None = None
        self._stats = EngineStats()
        self.num_restarts = 0
        self._violations_before = 0  # of engines that are no more
        self._child = _Child(self._options)
        try:
            ready = self._wait_until_ready()
            tokenizer = open_checkpoint(Path(self._options.model)).tokenizer()
        except BaseException:  # Ctrl-C too: nothing may be left behind
            self._child.end()
            raise
        self._info = EngineInfo(ready.config, tokenizer, ready.defaults, ready.eos_token_ids)
        self._is_ready = True
        self._thread = threading.Thread(target=self._watch, name="slipstream-engine-watch", daemon=True)
        self._thread.start()

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def stats(self) -> EngineStats:
        return self._stats

    @property
    def is_ready(self) -> bool:
        """Whether requests can be taken now; false while a dead engine is replaced."""
        return self._is_ready

    @property
    def failure(self) -> str:
        """Why requests cannot be taken now."""
        return self._failure or "the engine is being restarted; try again in a moment"

    @property
    def pid(self) -> int:
        return self._child.process.pid

    def add(self, request: Request) -> None:
        with self._lock:
            if not self._is_ready or not self._child.send(Add(request)):
                raise EngineError(self.failure)
            self._known.add(request.request_id)

    def finish(self, request_id: str) -> None:
        with self._lock:
            self._known.discard(request_id)
            if self._is_ready:
                self._child.send(Finish(request_id))

    def close(self) -> None:
        with self._lock:
            self._closing = True
            self._is_ready = False
            self._child.send(Stop())
            self._pause.set()
        self._thread.join(_STOP_S + 1)
        self._child.end(_STOP_S)
        self._lose_all("the engine was closed")

    def _wait_until_ready(self) -> Ready:
        while True:
            message = self._child.receive()
            if isinstance(message, Ready):
                return message
            if isinstance(message, Refused):
                raise getattr(errors, message.kind, SlipstreamError)(message.message)
            if message is None and (not self._child.is_alive or self._closing):
                code = self._child.process.poll()
                raise EngineError(f"the engine process ended with code {code} while it was starting")

    def _watch(self) -> None:
        while not self._closing or self._child.is_alive:
            message = self._child.receive()
            if isinstance(message, TokenUpdates):
                self._hand_on(message)
            elif isinstance(message, Stats):
                message.stats.num_sync_violations += self._violations_before
                self._stats = message.stats
            elif message is None and not self._child.is_alive:
                if self._closing:
                    return
                self._replace()

    def _hand_on(self, updates: TokenUpdates) -> None:
        with self._lock:
            self._known.difference_update(updates.ended)
        self._deliver(updates)

    def _replace(self) -> None:
        """The process is dead: say so to whoever waits for it, and start another."""
        code = self._child.process.poll()
        with self._lock:
            self._is_ready = False
        logger.error("the engine process ended with code %s; starting another", code)
        self._lose_all(f"the engine process ended with code {code}; it is being restarted, send the request again")
        self._child.end()
        self._violations_before = self._stats.num_sync_violations
        self._stats = EngineStats(num_sync_violations=self._violations_before)
        pause_s = 1.0
        while not self._closing:
            try:
                child = _Child(self._options)
                with self._lock:
                    self._child = child
                self._wait_until_ready()
            except Exception as error:  # whatever it is, the next try may do better
                self._child.end()
                self._failure = f"the engine cannot be restarted: {error}"
                logger.error("%s; next try in %g s", self._failure, pause_s)
                self._pause.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            with self._lock:
                self._is_ready, self._failure = not self._closing, None
                self.num_restarts += 1
                if self._closing:
                    child.send(Stop())  # the one that `close` sent went to the dead
            logger.warning("the engine is back")
            return

    def _lose_all(self, reason: str) -> None:
        with self._lock:
            lost, self._known = sorted(self._known), set()
        if lost:
            # Not the requests' fault, hence "abort" and not "error".
            now = time.monotonic()
            self._deliver(TokenUpdates.of([TokenUpdate(i, [], "abort", error=reason, time=now) for i in lost]))
