"""The engine in a thread of the caller's process.

The engine is built in the thread that runs it. torch's CPU kernels keep a pool of workers for each thread that calls
them; a second pool puts the workers to sleep between kernels, which makes a step three times slower.
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
from slipstream.output import TokenUpdate, TokenUpdates
from slipstream.request import Request

_EXIT_INTERRUPTED = 130
_WAIT_SLICE_S = 0.5
_abandoned_threads: list[threading.Thread] = []  # still loading an engine whose caller was interrupted


def _leave_at_once() -> None:
    """Leave the interpreter without running the destructors of native libraries, which would crash under a thread that
    is still inside native code."""
    if any(thread.is_alive() for thread in _abandoned_threads):
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(_EXIT_INTERRUPTED)


def _wait_for_engine(built: Future[Engine]) -> Engine:
    """Wait in slices: a signal that arrives just before the thread blocks on a lock is noticed only after that lock."""
    while not wait((built,), timeout=_WAIT_SLICE_S).done:
        pass
    return built.result()  # re-raises the build's error


atexit.register(_leave_at_once)  # registered early, so that it runs after other exit handlers


class RunningEngine(Protocol):
    """An engine in a thread or in a process: requests go in, and ``deliver`` is called with its updates."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def id_prefix(self) -> str:
        """The prefix of its requests' ids, where the engine has several clients."""
        ...

    def add(self, request: Request) -> None: ...

    def finish(self, request_id: str) -> None:
        """Stop computing a request whose end the caller has decided; nothing more is delivered for it."""
        ...

    def close(self) -> None: ...


class EngineLoop:
    id_prefix = ""

    def __init__(self, build: Callable[[], Engine], deliver: Deliver) -> None:
        self._deliver = deliver
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._failure: str | None = None  # why requests are refused
        built: Future[Engine] = Future()
        self._thread = threading.Thread(target=self._run, args=(build, built), name="slipstream-engine", daemon=True)
        try:  # an interrupt may come while the thread is being started
            self._thread.start()
            engine = _wait_for_engine(built)
        except BaseException:
            _abandoned_threads.append(self._thread)
            raise
        self.core: EngineCore | None = engine.core
        self._stats = engine.core.stats
        self.info = engine.describe()
        # An interpreter that exits while a thread is inside CUDA calls takes the process down.
        atexit.register(self._stop)

    @property
    def stats(self) -> EngineStats:
        return self._stats if self.core is None else self.core.stats

    def add(self, request: Request) -> None:
        # Under the lock: a message put after the loop has emptied its inbox for the last time would never be read.
        with self._lock:
            if self._failure:
                raise EngineError(self._failure)
            self._inbox.put(Add(request))

    def finish(self, request_id: str) -> None:
        self._inbox.put(Finish(request_id))

    def close(self) -> None:
        """End the thread and release the device's memory: the next engine may need all of it."""
        atexit.unregister(self._stop)
        self._stop()
        if self.core is not None:
            self._stats, device, self.core = self.core.stats, self.core.runner.device, None
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
        """The core failed: every request ends with the error at once, and later ones are refused."""
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
        self._deliver(TokenUpdates.from_list([TokenUpdate(i, [], "error", error=reason) for i in sorted(lost)]))
