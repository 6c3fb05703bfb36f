"""Load from several processes: started, released at the same moment, and their columns joined."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from slipstream.errors import RequestError
from slipstream.load.records import Records
from slipstream.load.worker import Task

# From the start signal to the first request: long enough for every process to receive the signal.
_HEAD_START_S = 0.05
_POLL_S = 0.1
_END_S = 10.0  # for a process to return its records, once told to stop


@dataclass(slots=True)
class Progress:
    num_ok: int = 0
    num_failed: int = 0
    num_events: int = 0


def share_out(
    num_processes: int, task: Callable[[int, range, range], Task], num_requests: int, warmup: int
) -> list[Task]:
    """The tasks of all processes: ``task`` makes one from its rank, its requests and its warm-up requests."""
    return [
        task(rank, range(rank, num_requests, num_processes), range(rank, warmup, num_processes))
        for rank in range(num_processes)
    ]


class ClientProcesses:
    """Runs tasks, one process each."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._workers = [_Process(task) for task in tasks]

    def warm_up(self, is_stopped: Callable[[], bool]) -> bool:
        """Wait until all have built their requests and have warmed up. False if stopped before."""
        ready = self._collect("ready", lambda *_: None, is_stopped)
        if ready is None:
            return False
        if failures := [failure for failure in ready if failure is not None]:
            raise RequestError(f"no request of the warm-up succeeded: {failures[0]}{_hint(failures[0])}")
        return True

    def measure(self, on_progress: Callable[[Progress], None], is_stopped: Callable[[], bool]) -> Records:
        """Start all processes at the same time, and wait for the end or for ``is_stopped``."""
        origin = time.monotonic() + _HEAD_START_S
        counts = [(0, 0, 0)] * len(self._workers)

        def show(rank: int, *figures: int) -> None:
            counts[rank] = figures  # type: ignore[assignment]
            on_progress(Progress(*(sum(column) for column in zip(*counts, strict=True))))

        for worker in self._workers:
            worker.send(("start", origin))
        parts = self._collect("done", show, is_stopped) or []
        return Records.joined(parts)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()

    def _collect(self, what: str, on_other: Callable[..., None], is_stopped: Callable[[], bool]) -> list[Any] | None:
        """One message of this kind from each process. Once stopped, the processes still return their records."""
        found: dict[int, Any] = {}
        deadline = None
        ranks = {worker.connection: rank for rank, worker in enumerate(self._workers)}
        while len(found) < len(self._workers):
            if deadline is None and is_stopped():
                if what == "ready":
                    return None
                deadline = time.monotonic() + _END_S
                for worker in self._workers:
                    worker.send(("stop",))
            if deadline is not None and time.monotonic() > deadline:
                raise RequestError("a client process does not stop; its figures are lost")
            waiting = [connection for connection, rank in ranks.items() if rank not in found]
            for connection in wait(waiting, _POLL_S):
                assert isinstance(connection, Connection)
                rank = ranks[connection]
                kind, *content = self._workers[rank].receive()
                if kind == what:
                    found[rank] = content[0]
                else:
                    on_other(rank, *content)
        return [found[rank] for rank in range(len(self._workers))]


class _Process:
    """One client process and the connection to it."""

    def __init__(self, task: Task) -> None:
        self.connection, theirs = Pipe()
        command = [sys.executable, "-m", "slipstream.load.worker", str(theirs.fileno())]
        # In its own session: Ctrl-C is for the parent, which then collects the records.
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        self.send(task)

    def send(self, message: object) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the next receive raises the error
            self.connection.send(message)

    def receive(self) -> tuple[Any, ...]:
        try:
            message: tuple[Any, ...] = self.connection.recv()
        except (EOFError, ConnectionResetError) as error:
            code = self._process.wait()
            raise RequestError(f"a client process died (exit code {code}); its figures are lost") from error
        return message

    def close(self) -> None:
        self.connection.close()  # which makes it exit
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def client_processes(tasks: Sequence[Task]) -> Iterator[ClientProcesses]:
    processes = ClientProcesses(tasks)
    try:
        yield processes
    finally:
        processes.close()


def _hint(failure: str) -> str:
    return "; --no-ignore-eos leaves that field out" if "ignore_eos" in failure else ""
