"""Several front ends that share a port and an engine: started, replaced when one dies, and ended together.

It owns what they share: the port, the file of counters, and the message to the engine when a front end is gone.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec

from slipstream.config import child_environment
from slipstream.engine.supervisor import EngineSupervisor
from slipstream.errors import EngineError
from slipstream.server.counters import SharedCounters
from slipstream.server.ending import Ending
from slipstream.server.front_end_process import COUNTERS, READY, FrontEndTask, link_address
from slipstream.server.metrics import LAYOUT
from slipstream.server.settings import ServerSettings

logger = logging.getLogger("slipstream.server")

_POLL_S = 0.05
_END_S = 5.0  # after the time that requests have to finish
_LONGEST_PAUSE_S = 30.0  # before a front end that keeps dying is started again


class _Member:
    """One front end's process."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.incarnation = -1
        self.process: subprocess.Popen[bytes] | None = None
        self.started_at = 0.0
        self.restart_at = 0.0
        self.pause_s = 0.0

    def start(self, task: FrontEndTask) -> None:
        command = [sys.executable, "-m", "slipstream.server.front_end_process"]
        # In a process group of its own: a terminal's Ctrl-C goes to the parent, which signals its front ends.
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=child_environment(), process_group=0
        )
        self.started_at = time.monotonic()
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(task))
        self.process.stdin.close()

    def wait_until_ready(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        if self.process.stdout.readline() != READY:
            raise EngineError(f"front end {self.number} ended with code {self.process.wait()} while it was starting")

    @property
    def has_died(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def wait_before_restart(self, now: float) -> None:
        has_run_well = now - self.started_at > _LONGEST_PAUSE_S
        self.pause_s = 0.0 if has_run_well else min(max(0.5, 2 * self.pause_s), _LONGEST_PAUSE_S)
        self.started_at, self.restart_at = now, now + self.pause_s

    def signal(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def end(self, deadline: float) -> None:
        if self.process is None:
            return
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


class FrontEndGroup:
    def __init__(
        self, model_name: str, settings: ServerSettings, supervisor: EngineSupervisor, listener: socket.socket
    ) -> None:
        self._model_name = model_name
        self._settings = settings
        self._supervisor = supervisor
        self._port: int = listener.getsockname()[1]
        self._members = [_Member(number) for number in range(supervisor.num_clients)]
        path = supervisor.folder / COUNTERS
        SharedCounters.create(path, LAYOUT, len(self._members))
        self._counters = SharedCounters(LAYOUT, path, 0, len(self._members))

    def run(self, announce: Callable[[], None], ending: Ending) -> None:
        """Serve until a signal comes; then every front end finishes the requests under way."""
        try:
            for member in self._members:
                self._start(member)
            for member in self._members:
                member.wait_until_ready()
            announce()
            while not ending.number:
                self._replace_dead()
                time.sleep(_POLL_S)
        finally:
            self._end(ending)

    def _start(self, member: _Member) -> None:
        member.incarnation += 1
        supervisor = self._supervisor
        member.start(
            FrontEndTask(
                address=link_address(supervisor, member.number, member.incarnation),
                ready=supervisor.ready,
                model_folder=str(supervisor.model),
                model_name=self._model_name,
                settings=self._settings,
                port=self._port,
                num_front_ends=len(self._members),
                parent=os.getpid(),
            )
        )

    def _replace_dead(self) -> None:
        now = time.monotonic()
        for member in self._members:
            if member.has_died:
                assert member.process is not None and member.process.stdout is not None
                logger.error("front end %d ended with code %d", member.number, member.process.returncode)
                member.process.stdout.close()
                member.process = None
                # Its requests have no reader any more, and its gauges count none under way.
                self._supervisor.end_client(member.number, member.incarnation)
                self._counters.clear("open", member.number)
                member.wait_before_restart(now)
            elif member.process is None and now >= member.restart_at:
                try:
                    self._start(member)
                except OSError as error:  # no process or memory is available now; the others continue
                    logger.error("front end %d cannot be started: %s", member.number, error)
                    member.wait_before_restart(now)

    def _end(self, ending: Ending) -> None:
        for member in self._members:
            member.signal(signal.SIGTERM)
        deadline = time.monotonic() + self._settings.shutdown_timeout_s + _END_S
        was_urgent = False
        while time.monotonic() < deadline and not all(m.process is None or m.has_died for m in self._members):
            if ending.is_urgent and not was_urgent:
                was_urgent = True
                for member in self._members:
                    member.signal(signal.SIGTERM)
            time.sleep(_POLL_S)
        for member in self._members:
            member.end(time.monotonic())
