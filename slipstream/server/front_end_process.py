"""A front end's process: ``python -m slipstream.server.front_end_process``, started by ``front_end_group.py``.

Its settings come as JSON on standard input; the line ``ready`` on standard output says that it serves.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from slipstream.checkpoints.checkpoint import open_checkpoint
from slipstream.engine.client import EngineClient
from slipstream.engine.link import EngineLink, LinkAddress
from slipstream.engine.supervisor import EngineSupervisor
from slipstream.engine.wire import Ready
from slipstream.errors import ConfigError
from slipstream.server.counters import SharedCounters
from slipstream.server.ending import Ending, noting_signals
from slipstream.server.front_end import FrontEnd
from slipstream.server.metrics import LAYOUT
from slipstream.server.settings import ServerSettings
from slipstream.text.tokenizer import Tokenizer

LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"
READY = b"ready\n"
COUNTERS = "counters"  # the file's name in the folder of the sockets
_ORPHAN_CHECK_S = 1.0
_EXIT_ORPHAN = 3


@dataclass(frozen=True)
class FrontEndTask:
    """Everything that a front end's process is given."""

    address: LinkAddress
    ready: Ready
    model_folder: str
    model_name: str
    settings: ServerSettings
    port: int  # shared by all of them
    num_front_ends: int
    parent: int


def link_address(supervisor: EngineSupervisor, client: int = 0, incarnation: int = 0) -> LinkAddress:
    state = supervisor.state()
    return LinkAddress(
        str(supervisor.folder),
        client,
        state.generation,
        supervisor.step_timeout_s,
        incarnation,
        state.is_ready,
        state.num_restarts,
        state.num_sync_violations,
    )


def open_linked_client(address: LinkAddress, ready: Ready, tokenizer: Tokenizer) -> EngineClient:
    """A client that processes the engine's updates in the thread that reads them."""
    return EngineClient(lambda deliver: EngineLink(address, ready, tokenizer, deliver), in_line=True)


def open_listener(host: str, port: int, *, is_shared: bool) -> socket.socket:
    """A bound socket that does not listen yet. ``is_shared``: other processes listen on the same port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return listener


def open_own_listener(host: str, port: int, *, is_shared: bool) -> socket.socket:
    """The server's first socket: bound exclusively, so that a port in use by another server is refused, then shared."""
    listener = open_listener(host, port, is_shared=False)
    if is_shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return listener


def run_front_end(front_end: FrontEnd, listener: socket.socket, announce: Callable[[], None], ending: Ending) -> None:
    """Serve in this process until a signal comes, then finish the requests under way."""

    async def run() -> None:
        asked = asyncio.Event()
        loop = asyncio.get_running_loop()
        ending.on_signal = lambda: _wake(loop, asked)
        await front_end.start([listener])
        announce()
        if not ending.number:
            await asked.wait()
        await front_end.shut_down(lambda: ending.is_urgent)

    try:
        asyncio.run(run())
    finally:
        ending.on_signal = lambda: None
        front_end.client.close()


def _wake(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    loop.call_soon_threadsafe(event.set)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_ORPHAN_CHECK_S)
    os._exit(_EXIT_ORPHAN)


def main() -> int:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=LOG_FORMAT)
    if not (given := sys.stdin.buffer.read()):
        return _EXIT_ORPHAN
    task = msgspec.json.decode(given, type=FrontEndTask)
    threading.Thread(target=_end_with, args=(task.parent,), name="slipstream-parent-watch", daemon=True).start()
    tokenizer = open_checkpoint(Path(task.model_folder)).tokenizer()
    address, settings = task.address, task.settings
    counters = SharedCounters(LAYOUT, Path(address.folder) / COUNTERS, address.client, task.num_front_ends)
    client = open_linked_client(address, task.ready, tokenizer)
    front_end = FrontEnd(client, task.model_name, settings, counters, address.client)
    listener = open_listener(settings.host, task.port, is_shared=True)

    def announce() -> None:
        sys.stdout.buffer.write(READY)
        sys.stdout.buffer.flush()

    with noting_signals() as ending:
        run_front_end(front_end, listener, announce, ending)
    return 0


if __name__ == "__main__":
    sys.exit(main())
