"""One client process: builds its share of the requests, reports ready, sends them at the start signal, returns columns.

Started by ``slipstream.load.processes`` with the number of a socket to its parent.
"""

from __future__ import annotations

import contextlib
import gc
import resource
import signal
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

from slipstream.load.client import LoadClient, Script
from slipstream.load.records import Recorder, Records
from slipstream.load.target import Target
from slipstream.load.workload import FIRST_WARMUP, BodyFormat, Workload


@dataclass(frozen=True, slots=True)
class Task:
    """What one process does. Requests are distributed round-robin: this one's are ``indices``."""

    target: Target
    body_format: BodyFormat
    workload: Workload
    indices: range
    streams: int | None
    due: tuple[float, ...]
    warmups: range
    timeout_s: float

    def bodies(self) -> list[bytes]:
        return [self.body_format.encode(self.workload.request(idx)) for idx in self.indices]

    def client(self, script: Script) -> LoadClient:
        return LoadClient(self.target, self.target.head(self.body_format.api), script, timeout_s=self.timeout_s)


class Worker:
    """Carries out one task, controlled by the parent."""

    def __init__(self, parent: Connection) -> None:
        self._parent = parent
        self._stopped = False

    def run(self, task: Task) -> None:
        bodies = task.bodies()
        self._parent.send(("ready", self._warm_up(task)))
        message = self._receive()
        if message is None or message[0] != "start":
            return
        origin = message[1]
        client = task.client(Script(bodies, task.streams, task.due))
        # Garbage collection would delay reading tokens, and there is hardly any garbage.
        gc.freeze()
        gc.disable()
        time.sleep(max(0.0, origin - time.monotonic()))
        self._parent.send(("done", self._measure(client, origin)))

    def _measure(self, client: LoadClient, origin: float) -> Records:
        cpu, wall = time.process_time(), time.monotonic()

        def on_tick(recorder: Recorder) -> None:
            self._listen(client)
            self._tell(("progress", recorder.num_ok, recorder.num_failed, recorder.num_events))

        client.run(origin, on_tick, self._parent.fileno())
        spent = {"cpu_s": time.process_time() - cpu, "wall_s": time.monotonic() - wall}
        return client.recorder.records(origin, spent | {"num_events": client.recorder.num_events})

    def _warm_up(self, task: Task) -> str | None:
        """Send requests that do not count; returns why none succeeded, or None."""
        bodies = [task.body_format.encode(task.workload.request(FIRST_WARMUP + idx)) for idx in task.warmups]
        if not bodies:
            return None
        client = task.client(Script(bodies, min(len(bodies), task.streams or len(bodies))))
        client.run(time.monotonic(), lambda _: self._listen(client), self._parent.fileno())
        return None if client.recorder.num_ok or self._stopped else client.recorder.failures[0]

    def _listen(self, client: LoadClient) -> None:
        """Stop when the parent says so or has exited."""
        with contextlib.suppress(EOFError, OSError):
            while self._parent.poll():
                if self._parent.recv()[0] == "stop":
                    break
            else:
                return
        self._stopped = True
        client.stop()

    def _receive(self) -> tuple[str, float] | None:
        with contextlib.suppress(EOFError, OSError):
            message: tuple[str, float] = self._parent.recv()
            return message
        return None

    def _tell(self, message: tuple[object, ...]) -> None:
        with contextlib.suppress(OSError):
            self._parent.send(message)


def allow_many_files() -> int:
    """Raise this process's limit of open files as far as possible; returns it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def main(argv: list[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    allow_many_files()
    parent = Connection(int(argv[0]))
    with contextlib.suppress(EOFError, OSError):  # the parent has exited
        Worker(parent).run(parent.recv())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
