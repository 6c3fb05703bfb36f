"""The engine's process: ``python -m slipstream.engine.worker FOLDER GENERATION CLIENTS PARENT [OPERATION ...]``.

``engine.supervisor`` starts it. The engine has one thread, which owns torch's pool of workers; only the messages that
it takes between steps can delay a step. A second thread sends a pulse every second, and exits the process when its
parent is gone.
"""

from __future__ import annotations

import os
import queue
import shutil
import signal
import sys
import threading
import time
from collections import deque
from pathlib import Path

import msgspec
import zmq

from slipstream.config import EngineOptions
from slipstream.device.sync_guard import HostSyncError
from slipstream.engine.build import build_serving_engine
from slipstream.engine.core import EngineCore
from slipstream.engine.driver import Add, Driver, Finish, Message
from slipstream.engine.split_updates import UpdateSplitter
from slipstream.engine.wire import (
    Leave,
    MalformedRequest,
    Pulse,
    Ready,
    Refused,
    Stats,
    client_address,
    decode,
    encode,
    engine_address,
    watch_address,
)
from slipstream.errors import SlipstreamError
from slipstream.output import TokenUpdate, TokenUpdates
from slipstream.sampling.registry import register_modules

_STATS_EVERY_S = 0.1
_PULSE_EVERY_S = 1.0
_WAIT_MS = 500  # for a message, before the main thread reports progress again
_EXIT_ORPHAN = 3


class WorkerArgs:
    """The folder of the sockets, the engine's generation, the number of clients, and the parent's process id.

    Last come the modules of registered sampling operations.
    """

    def __init__(self, folder: str, generation: str, num_clients: str, parent: str, *operations: str) -> None:
        self.folder, self.generation = Path(folder), int(generation)
        self.num_clients, self.parent = int(num_clients), int(parent)
        self.operations = operations

    @property
    def client_addresses(self) -> list[str]:
        return [client_address(self.folder, client) for client in range(self.num_clients)]

    @property
    def watch_address(self) -> str:
        return watch_address(self.folder, self.generation)


def _open_push(context: zmq.Context[zmq.Socket[bytes]], address: str, linger_ms: int) -> zmq.Socket[bytes]:
    outbox = context.socket(zmq.PUSH)
    outbox.setsockopt(zmq.SNDHWM, 0)  # no limit: a slow client must not stop the engine
    outbox.setsockopt(zmq.LINGER, linger_ms)
    outbox.connect(address)
    return outbox


class _Pulse:
    """Reports to supervisor and clients that this process is alive, from its start."""

    def __init__(self, args: WorkerArgs) -> None:
        self._args = args
        self._at_work_since: float | None = None  # None while it loads, which may take minutes
        threading.Thread(target=self._run, name="slipstream-pulse", daemon=True).start()

    def note_progress(self) -> None:
        self._at_work_since = time.monotonic()

    def _run(self) -> None:
        context = zmq.Context()  # a socket belongs to one thread
        addresses = [self._args.watch_address, *self._args.client_addresses]
        outboxes = [_open_push(context, address, 0) for address in addresses]
        while True:
            if os.getppid() != self._args.parent:
                # The parent could not end this process, which may be in the middle of loading.
                shutil.rmtree(self._args.folder, ignore_errors=True)
                os._exit(_EXIT_ORPHAN)
            since = self._at_work_since
            frames = encode(Pulse(0.0 if since is None else time.monotonic() - since))
            for outbox in outboxes:
                outbox.send_multipart(frames)
            time.sleep(_PULSE_EVERY_S)


class Worker:
    def __init__(self, args: WorkerArgs) -> None:
        context = zmq.Context()
        self._inbox = context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.RCVHWM, 0)
        self._inbox.bind(engine_address(args.folder, args.generation))
        self._pulse = _Pulse(args)  # last, since it may remove the folder: no file may be created in it after
        # What is queued when the process ends is still sent, but not for ever.
        self._watch = _open_push(context, args.watch_address, 1000)
        self._clients = [_open_push(context, address, 1000) for address in args.client_addresses]
        self._splitter = UpdateSplitter(args.num_clients)
        self._context = context
        self._operations = args.operations
        self._core: EngineCore | None = None
        self._driver: Driver | None = None
        self._early: deque[Message] = deque()  # the rest of a message that carries several
        self._gone: tuple[str, ...] = ()  # prefixes of clients that are gone
        self._stats_sent_at = 0.0

    def run(self, options: EngineOptions) -> int:
        try:
            register_modules(self._operations)
            engine = build_serving_engine(options)
        except SlipstreamError as error:
            self._watch.send_multipart(encode(Refused(type(error).__name__, str(error))))
            return 2
        self._core = engine.core
        self._driver = Driver(engine.core, self._receive, self._deliver)
        info = (engine.defaults, engine.eos_token_ids, engine.pooling, engine.model_path)
        ready = Ready(engine.config.for_clients(), *info)
        self._watch.send_multipart(encode(ready))
        try:
            self._driver.run()
        except HostSyncError:
            self._send_stats()  # the violation is counted, and the count must outlive this process
            raise
        return 0

    def close(self) -> None:
        self._context.destroy()

    def _receive(self, wait: bool) -> Message:
        if wait or self._stats_are_due:  # also during graph capture, which may take a minute
            self._send_stats()
        while True:
            self._pulse.note_progress()
            if self._early:
                return self._early.popleft()
            if self._inbox.poll(_WAIT_MS if wait else 0):
                if (message := self._take_message()) is not None:
                    return message
            elif not wait:
                raise queue.Empty

    def _take_message(self) -> Message | None:
        """The next message for the engine; None if it was not for the engine."""
        try:
            message: Message | Leave = decode(self._inbox.recv_multipart())
        except MalformedRequest as error:
            reason = f"the engine cannot read this request: {error}"
            self._deliver(TokenUpdates.from_list([TokenUpdate(error.request_id, [], "error", error=reason)]))
            return None
        if isinstance(message, Leave):
            assert self._driver is not None
            self._gone += (message.prefix,)
            self._early += [Finish(known) for known in self._driver.known if known.startswith(message.prefix)]
            return None
        if isinstance(message, Add) and message.request.request_id.startswith(self._gone):
            return None  # sent before the client ended, but received after Leave, which took another socket
        return message

    def _deliver(self, updates: TokenUpdates) -> None:
        for client, part in self._splitter.split(updates):
            self._clients[client].send_multipart(encode(part))
        if self._stats_are_due:
            self._send_stats()

    @property
    def _stats_are_due(self) -> bool:
        return time.monotonic() - self._stats_sent_at > _STATS_EVERY_S

    def _send_stats(self) -> None:
        assert self._core is not None
        frames = encode(Stats(self._core.stats))
        for outbox in (self._watch, *self._clients):
            outbox.send_multipart(frames)
        self._stats_sent_at = time.monotonic()


def main() -> int:
    # The server decides how to end after Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    args = WorkerArgs(*sys.argv[1:])
    if not (given := sys.stdin.buffer.read()):
        # The server ended before it sent the options.
        shutil.rmtree(args.folder, ignore_errors=True)
        return _EXIT_ORPHAN
    options = msgspec.json.decode(given, type=EngineOptions)
    worker = Worker(args)
    try:
        return worker.run(options)
    finally:
        worker.close()


if __name__ == "__main__":
    sys.exit(main())
