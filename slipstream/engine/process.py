"""The engine in its own process for a library's caller: HTTP and tokenising never delay a step, and a crash of the
engine does not end the caller.

If the process dies or hangs, every request it had fails at once, and another one is started.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from slipstream.checkpoints.checkpoint import open_checkpoint
from slipstream.config import EngineOptions
from slipstream.engine.build import EngineInfo
from slipstream.engine.driver import Deliver
from slipstream.engine.find_models import resolve_models
from slipstream.engine.link import EngineLink, LinkAddress
from slipstream.engine.stats import EngineStats
from slipstream.engine.supervisor import EngineSupervisor
from slipstream.request import Request
from slipstream.text.tokenizer import Tokenizer

_WAIT_MS = 50
_MESSAGES_A_TURN = 64


def open_supervisor(
    options: EngineOptions, num_clients: int = 1, step_timeout_s: float = 300.0
) -> tuple[EngineSupervisor, Tokenizer]:
    """Start the engine's process; models are downloaded here, where progress can be shown."""
    options = resolve_models(options)
    supervisor = EngineSupervisor(options, num_clients, step_timeout_s)
    try:
        return supervisor, open_checkpoint(Path(options.model)).tokenizer()
    except BaseException:  # also KeyboardInterrupt: no process or file may be left over
        supervisor.close()
        raise


class EngineProcess:
    """A ``RunningEngine`` in another process. ``deliver`` is called from a thread of this object."""

    def __init__(self, options: EngineOptions, deliver: Deliver, step_timeout_s: float = 300.0) -> None:
        self.supervisor, tokenizer = open_supervisor(options, 1, step_timeout_s)
        address = LinkAddress(str(self.supervisor.folder), 0, self.supervisor.state().generation, step_timeout_s)
        self.link = EngineLink(address, self.supervisor.ready, tokenizer, deliver)
        self._closing = False
        self._watching = threading.Thread(target=self.supervisor.run, name="slipstream-engine-watch", daemon=True)
        self._reading = threading.Thread(target=self._read, name="slipstream-engine-read", daemon=True)
        self._watching.start()
        self._reading.start()

    @property
    def info(self) -> EngineInfo:
        return self.link.info

    @property
    def id_prefix(self) -> str:
        return self.link.id_prefix

    @property
    def stats(self) -> EngineStats:
        return self.link.stats

    @property
    def is_ready(self) -> bool:
        return self.link.is_ready

    @property
    def trouble(self) -> str | None:
        return self.link.trouble

    @property
    def num_restarts(self) -> int:
        return self.link.num_restarts

    @property
    def pid(self) -> int:
        return self.supervisor.pid

    def add(self, request: Request) -> None:
        self.link.add(request)

    def finish(self, request_id: str) -> None:
        self.link.finish(request_id)

    def close(self) -> None:
        self.supervisor.close(self._watching)
        self._closing = True
        self._reading.join()
        self.link.close()

    def _read(self) -> None:
        noted_at = time.monotonic()
        while not self._closing:
            self.link.wait(_WAIT_MS)
            self.link.read(_MESSAGES_A_TURN)
            if time.monotonic() - noted_at > 2 * _WAIT_MS / 1000:
                self.link.note_time()
                noted_at = time.monotonic()
