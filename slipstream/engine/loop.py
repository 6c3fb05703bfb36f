"""The engine in a thread of the caller's process.

The engine is built in the thread that runs it. torch's CPU kernels keep a pool of workers for every thread that calls
them; a second pool makes the workers sleep between kernels, which was measured to make a step three times slower.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Protocol

from slipstream.engine.build import Engine, EngineInfo, release_memory
from slipstream.engine.core import EngineCore
from slipstream.engine.driver import Add, Deliver, Driver, Finish, Message, Stop
from slipstream.engine.stats import EngineStats
from slipstream.errors import EngineError
from slipstream.types import Request, TokenUpdate, TokenUpdates

_EXIT_INTERRUPTED = 130
_WAIT_SLICE_S = 0.5
_loading_on: list[threading.Thread] = []  # for nobody: whoever waited for the engine was interrupted


def _leave_at_once() -> None:
    """At the interpreter's end. Native code that still runs in a thread would meet the destructors of its libraries,
    and end the process with a message of its own: so they are left out."""
    if any(thread.is_alive() for thread in _loading_on):
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(_EXIT_INTERRUPTED)


def _wait_for_engine(built: Future[Engine]) -> Engine:
    """Wait in slices: a signal that arrives just before the thread blocks on a lock is noticed only after that lock."""
    while not wait((built,), timeout=_WAIT_SLICE_S).done:
        pass
    return built.result()  # raises what the build raised


atexit.register(_leave_at_once)  # as early as can be, so that it comes behind what others do at the end


class RunningEngine(Protocol):
    """An engine at work, in a thread or in a process: requests go in, and ``deliver`` is called with what comes out."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def id_prefix(self) -> str:
        """What the ids of its requests begin with, where the engine has several clients."""
        ...

    def add(self, request: Request) -> None: ...

    def finish(self, request_id: str) -> None:
        """Stop computing a request whose end the caller has already decided; nothing more is delivered for it."""
        ...

    def close(self) -> None: ...


class EngineLoop:
    id_prefix = ""

    def __init__(self, build: Callable[[], Engine], deliver: Deliver) -> None:
        self._deliver = deliver
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._failure: str | None = None  # why nothing is taken any more
        built: Future[Engine] = Future()
        self._thread = threading.Thread(target=self._run, args=(build, built), name="slipstream-engine", daemon=True)
        try:  # an interrupt may come while the thread is being started
            self._thread.start()
            engine = _wait_for_engine(built)
        except BaseException:
            _loading_on.append(self._thread)
            raise
        self._core: EngineCore | None = engine.core
        self._stats = engine.core.stats
        self.info = engine.describe()
        # An interpreter that ends under a thread in the middle of CUDA calls takes the process down with it.
        atexit.register(self._stop)

    @property
    def stats(self) -> EngineStats:
        return self._stats if self._core is None else self._core.stats

    def add(self, request: Request) -> None:
        # Under the lock: a message that arrives after the loop has emptied its inbox for the last time is never read.
        with self._lock:
            if self._failure:
                raise EngineError(self._failure)
            self._inbox.put(Add(request))

    def finish(self, request_id: str) -> None:
        self._inbox.put(Finish(request_id))

    def close(self) -> None:
        """End the thread, and give the device's memory back: the next engine may want all of it."""
        atexit.unregister(self._stop)
        self._stop()
        if self._core is not None:
            self._stats, device, self._core = self._core.stats, self._core.runner.device, None
            release_memory(device)

    def _stop(self) -> None:
        with self._lock:
            self._failure = self._failure or "the engine is closed"
            self._inbox.put(Stop())
        self._thread.join()

    def _run(self, build: Callable[[], Engine], built: Future[Engine]) -> None:
        try:
            engine = build()
        except BaseException as error:
            built.set_exception(error)
            return
        driver = Driver(engine.core, self._inbox.get, self._deliver)
        built.set_result(engine)
        try:
            driver.run()
        except Exception as error:
            self._fail(f"the engine stopped: {type(error).__name__}: {error}", driver.known)
            raise

    def _fail(self, reason: str, known: set[str]) -> None:
        """The core broke: every request learns it at once, and later ones are refused."""
        with self._lock:
            self._failure = reason
            lost = set(known)
            while True:
                try:
                    message = self._inbox.get(block=False)
                except queue.Empty:
                    break
                if isinstance(message, Add):
                    lost.add(message.request.request_id)
        self._deliver(TokenUpdates.of([TokenUpdate(i, [], "error", error=reason) for i in sorted(lost)]))
