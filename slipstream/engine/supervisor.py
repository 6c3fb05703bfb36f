"""Starts the engine's process, watches it, and starts another one when it dies or hangs.

Knows nothing of requests: clients talk to the engine themselves (``link.py``), and are notified here when it is lost
and when another one is ready. The sockets are in a folder that only this user can enter.
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq

from slipstream import errors
from slipstream.config import EngineOptions, child_environment
from slipstream.engine.driver import Stop
from slipstream.engine.pulse import HUNG_S, PulseMonitor
from slipstream.engine.wire import (
    EngineBack,
    EngineLost,
    Leave,
    Pulse,
    Ready,
    Refused,
    RestartFailed,
    Stats,
    client_address,
    client_prefix,
    decode,
    encode,
    engine_address,
    watch_address,
)
from slipstream.errors import EngineError, SlipstreamError
from slipstream.sampling import registry

logger = logging.getLogger("slipstream.engine")

_POLL_MS = 50  # how soon a death is noticed
_STOP_S = 5.0
_CONTEXT_END_S = 1.0
_LONGEST_PAUSE_S = 60.0  # between attempts to restart it


def open_push(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """A socket that sends without waiting; limiting the queue is up to the server."""
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.connect(address)
    return socket


def open_pull(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.bind(address)
    return socket


def close_context(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Close its sockets and terminate it. A signal during the creation of a socket may have left one that cannot be
    closed, and for which the context would wait for ever."""
    ending = threading.Thread(target=context.destroy, name="slipstream-zmq-end", daemon=True)
    ending.start()
    ending.join(_CONTEXT_END_S)


class _Child:
    """One engine process and what the supervisor knows of it."""

    def __init__(
        self, options: EngineOptions, folder: Path, generation: int, num_clients: int, step_timeout_s: float
    ) -> None:
        self.generation = generation
        self.monitor = PulseMonitor(step_timeout_s)
        self.num_sync_violations = 0
        self._context = zmq.Context()
        self._lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        try:
            self._inbox = open_pull(self._context, watch_address(folder, generation))
            self._outbox = open_push(self._context, engine_address(folder, generation))
            self.process = self._start(folder, num_clients)
            assert self.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it died at once, which waiting for it will show
                self.process.stdin.write(msgspec.json.encode(options))
                self.process.stdin.close()
        except BaseException:  # also KeyboardInterrupt: no process may stay
            self.end()
            raise

    def _start(self, folder: Path, num_clients: int) -> subprocess.Popen[bytes]:
        # The worker compares its parent with this process, and exits when it has another.
        arguments = [str(folder), str(self.generation), str(num_clients), str(os.getpid())]
        command = [sys.executable, "-m", "slipstream.engine.worker", *arguments, *registry.modules()]
        # torch's own pool must not spin on the cores that the C kernels' threads need next.
        environment = child_environment(OMP_WAIT_POLICY="passive")
        # In its own process group: a terminal's Ctrl-C goes to the server, which decides how the engine ends.
        return subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, process_group=0)

    def send(self, message: Any) -> None:
        with self._lock:
            if not self._outbox.closed:
                self._outbox.send_multipart(encode(message))

    def receive(self) -> Any:
        """The next message, or None if none came for a moment. Pulses and statistics are recorded here."""
        start = time.monotonic()
        if not self._inbox.poll(_POLL_MS):
            self.monitor.note_silence(min(time.monotonic() - start, 2 * _POLL_MS / 1000))
            return None
        message = decode(self._inbox.recv_multipart())
        self.monitor.note_message()
        if isinstance(message, Pulse):
            self.monitor.note_pulse(message.stuck_s)
            return None
        if isinstance(message, Stats):
            self.num_sync_violations = message.stats.num_sync_violations
            return None
        return message

    def read_last_messages(self) -> None:
        """Read what a process that has ended had sent before."""
        while self._inbox.poll(0):
            self.receive()

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def exit_code(self) -> int | None:
        return None if self.process is None else self.process.poll()

    def end_process(self, timeout_s: float = 0.0) -> None:
        """Let the process exit for a while, then kill it."""
        if self.process is not None:
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def end(self, timeout_s: float = 0.0) -> None:
        self.end_process(timeout_s)
        with self._lock:
            close_context(self._context)


@dataclass(frozen=True)
class EngineState:
    """The current engine, and totals of those before it."""

    generation: int
    is_ready: bool  # false while it starts, or when it could not be started
    num_restarts: int
    num_sync_violations: int  # of engines that have ended
    ready: Ready  # of the last one that was ready


class EngineSupervisor:
    """``run`` watches the process, in a thread of the caller's choice, until ``close``.

    ``clients`` are the numbers of the clients that may send requests; each binds its own socket (``link.py``).
    """

    def __init__(self, options: EngineOptions, num_clients: int = 1, step_timeout_s: float = 300.0) -> None:
        self._options = options
        self.model = options.model  # a local folder, since the model was resolved before
        self.num_clients = num_clients
        self.step_timeout_s = step_timeout_s
        self.folder = Path(tempfile.mkdtemp(prefix="slipstream-"))  # mode 0700
        self._closing = False
        self._pause = threading.Event()  # set to end a pause early
        self._lock = threading.Lock()
        self._num_violations = 0  # of engines that have ended
        self._num_restarts = 0
        self._is_ready = False
        self._context = zmq.Context()
        self._clients: Sequence[zmq.Socket[bytes]] = ()
        self._child: _Child | None = None
        try:
            self._clients = [open_push(self._context, client_address(self.folder, i)) for i in range(num_clients)]
            self._child = _Child(options, self.folder, 0, num_clients, step_timeout_s)
            self.ready = self._wait_until_ready(self._child)
            self._is_ready = True
        except BaseException:  # also KeyboardInterrupt: no process or file may be left over
            self._end()
            raise

    @property
    def child(self) -> _Child:
        assert self._child is not None
        return self._child

    def state(self) -> EngineState:
        """The state now, for a client that starts later and received no earlier messages."""
        with self._lock:
            return EngineState(
                self.child.generation, self._is_ready, self._num_restarts, self._num_violations, self.ready
            )

    @property
    def pid(self) -> int:
        process = self.child.process
        assert process is not None
        return process.pid

    def run(self) -> None:
        child = self.child
        while not self._closing or child.is_alive:
            if child.receive() is not None:
                continue
            if not child.is_alive:
                if self._closing:
                    return
                child = self._replace(child, f"the engine process ended with code {child.exit_code}")
            elif not self._closing and (trouble := child.monitor.find_trouble(HUNG_S)):
                child = self._replace(child, trouble)

    def end_client(self, client: int, incarnation: int) -> None:
        """A client's process has ended: its requests are no longer computed."""
        self.child.send(Leave(client_prefix(client, incarnation)))

    def stop(self) -> None:
        """Ask the engine to exit; ``run`` returns when it has."""
        with self._lock:
            self._closing = True
            self.child.send(Stop())
        self._pause.set()

    def close(self, watching: threading.Thread | None = None) -> None:
        self.stop()
        if watching is not None:
            watching.join(_STOP_S + 1)
            if watching.is_alive():  # it must not poll sockets that are closed here
                self.child.end_process(_STOP_S)
                watching.join(_STOP_S)
        self._end(_STOP_S)

    def _end(self, timeout_s: float = 0.0) -> None:
        if self._child is not None:
            self._child.end(timeout_s)
        with self._lock:
            close_context(self._context)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _tell_clients(self, message: Any) -> None:
        frames = encode(message)
        with self._lock:
            for client in self._clients:
                if not client.closed:
                    client.send_multipart(frames)

    def _wait_until_ready(self, child: _Child) -> Ready:
        while True:
            message = child.receive()
            if isinstance(message, Ready):
                return message
            if isinstance(message, Refused):
                raise getattr(errors, message.kind, SlipstreamError)(message.message)
            if message is None and (not child.is_alive or self._closing):
                raise EngineError(f"the engine process ended with code {child.exit_code} while it was starting")
            if (trouble := child.monitor.find_trouble(HUNG_S)) is not None:
                raise EngineError(f"{trouble} while it was starting")

    def _replace(self, child: _Child, reason: str) -> _Child:
        """Report a dead or hung process to its clients, and start another."""
        logger.error("%s; starting another", reason)
        if not child.is_alive:
            child.read_last_messages()
        with self._lock:
            self._is_ready = False
            self._num_violations += child.num_sync_violations
        self._tell_clients(EngineLost(child.generation, reason, self._num_violations))
        child.end()
        generation, pause_s = child.generation, 1.0
        while not self._closing:
            generation += 1
            try:
                child = _Child(self._options, self.folder, generation, self.num_clients, self.step_timeout_s)
                with self._lock:
                    self._child = child
                ready = self._wait_until_ready(child)
            except Exception as error:  # of any kind: the next attempt may succeed
                child.end()
                failure = f"the engine cannot be restarted: {error}"
                self._tell_clients(RestartFailed(failure))
                logger.error("%s; next try in %g s", failure, pause_s)
                self._pause.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            with self._lock:
                if self._closing:
                    child.send(Stop())  # `stop` sent its message to the process that has ended
                self.ready, self._is_ready = ready, True
                self._num_restarts += 1
            self._tell_clients(EngineBack(generation, self._num_restarts, ready))
            logger.warning("the engine is back")
            break
        return child
