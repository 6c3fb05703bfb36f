"""The engine's own process: ``python -m slipstream.engine.worker FOLDER``, started by ``engine.process``.

Everything happens in one thread: torch's pool of workers belongs to it, and nothing can delay a step but the messages
it takes in between.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

from slipstream.config import EngineOptions
from slipstream.device.sync_guard import HostSyncError
from slipstream.engine.build import build_engine
from slipstream.engine.core import EngineCore
from slipstream.engine.driver import Driver, Message
from slipstream.engine.wire import Ready, Refused, Stats, decode, encode
from slipstream.errors import SlipstreamError
from slipstream.types import TokenUpdates

_STATS_EVERY_S = 0.1
_ORPHAN_CHECK_MS = 500


class Worker:
    def __init__(self, folder: Path, parent: int) -> None:
        context = zmq.Context()
        self._inbox = context.socket(zmq.PULL)
        self._inbox.connect(f"ipc://{folder}/in")
        self._outbox = context.socket(zmq.PUSH)
        self._outbox.connect(f"ipc://{folder}/out")
        # What is queued when the process ends is still sent, but not for ever.
        self._outbox.setsockopt(zmq.LINGER, 1000)
        self._context = context
        self._parent = parent
        self._core: EngineCore | None = None
        self._stats_sent_at = 0.0

    def run(self, options: EngineOptions) -> int:
        try:
            engine = build_engine(options)
        except SlipstreamError as error:
            self._send(Refused(type(error).__name__, str(error)))
            return 2
        self._core = engine.core
        self._send(Ready(engine.config, engine.defaults, engine.eos_token_ids))
        try:
            Driver(engine.core, self._receive, self._deliver).run()
        except HostSyncError:
            self._send_stats()  # the violation is counted, and the count outlives this process
            raise
        return 0

    def close(self) -> None:
        self._context.destroy()

    def _receive(self, wait: bool) -> Message:
        if wait:
            self._send_stats()
        while True:
            if self._inbox.poll(_ORPHAN_CHECK_MS if wait else 0):
                message: Message = decode(self._inbox.recv_multipart())
                return message
            if os.getppid() != self._parent:
                raise SystemExit("the server is gone")
            if not wait:
                raise queue.Empty

    def _deliver(self, updates: TokenUpdates) -> None:
        self._send(updates)
        if time.monotonic() - self._stats_sent_at > _STATS_EVERY_S:
            self._send_stats()

    def _send_stats(self) -> None:
        assert self._core is not None
        self._send(Stats(self._core.stats))
        self._stats_sent_at = time.monotonic()

    def _send(self, message: Any) -> None:
        self._outbox.send_multipart(encode(message))


def main() -> int:
    # Ctrl-C goes to the whole group of processes; the server decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    options = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineOptions)
    folder, parent = sys.argv[1:]
    worker = Worker(Path(folder), int(parent))
    try:
        return worker.run(options)
    finally:
        worker.close()


if __name__ == "__main__":
    sys.exit(main())
