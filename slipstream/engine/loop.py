"""The engine's thread: builds the engine, takes requests from an inbox, steps the core, hands collected tokens on.

The engine is built in the thread that runs it. torch's CPU kernels keep a pool of workers for every thread that calls
them; a second pool makes the workers sleep between kernels, which was measured to make a step three times slower.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from slipstream.engine.build import Engine
from slipstream.engine.core import EngineCore, EngineStats
from slipstream.errors import EngineError, RequestError
from slipstream.types import Request, TokenUpdate

Deliver = Callable[[list[TokenUpdate]], None]


@dataclass(frozen=True, slots=True)
class _Add:
    request: Request


@dataclass(frozen=True, slots=True)
class _Finish:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


class EngineLoop:
    """Owns the core: no other thread may touch it. ``deliver`` is called from the loop's thread."""

    def __init__(self, build: Callable[[], Engine], deliver: Deliver) -> None:
        self._deliver = deliver
        self._inbox: queue.SimpleQueue[_Add | _Finish | _Stop] = queue.SimpleQueue()
        self._known: set[str] = set()  # requests that have not been told their end
        self._failure: str | None = None
        built: Future[Engine] = Future()
        self._thread = threading.Thread(target=self._run, args=(build, built), name="slipstream-engine", daemon=True)
        self._thread.start()
        self.engine = built.result()  # raises what the build raised

    def add(self, request: Request) -> None:
        if self._failure:
            raise EngineError(self._failure)
        self._inbox.put(_Add(request))

    def finish(self, request_id: str) -> None:
        """Stop computing a request whose end the caller has already decided; nothing more is delivered for it."""
        self._inbox.put(_Finish(request_id))

    def close(self) -> None:
        self._inbox.put(_Stop())
        self._thread.join()

    @property
    def stats(self) -> EngineStats:
        return self.engine.core.stats

    def _run(self, build: Callable[[], Engine], built: Future[Engine]) -> None:
        try:
            engine = build()
        except BaseException as error:
            built.set_exception(error)
            return
        self._core: EngineCore = engine.core
        built.set_result(engine)
        try:
            while self._take_messages():
                if self._core.has_work:
                    self._hand_on(self._core.step())
        except Exception as error:
            self._fail(f"the engine stopped: {type(error).__name__}: {error}")
            raise

    def _take_messages(self) -> bool:
        """Handle the inbox; wait for a message only when there is nothing to compute. False to end."""
        while True:
            try:
                message = self._inbox.get(block=not self._core.has_work)
            except queue.Empty:
                return True
            if isinstance(message, _Stop):
                self._hand_on([TokenUpdate(i, [], "abort", error="the engine was closed") for i in sorted(self._known)])
                return False
            if isinstance(message, _Finish):
                self._core.finish(message.request_id)
                self._known.discard(message.request_id)
            else:
                self._add(message.request)

    def _add(self, request: Request) -> None:
        try:
            self._core.add(request)
            self._known.add(request.request_id)
        except RequestError as error:
            self._deliver([TokenUpdate(request.request_id, [], "error", error=str(error))])

    def _hand_on(self, updates: list[TokenUpdate]) -> None:
        self._known.difference_update(u.request_id for u in updates if u.finish_reason is not None)
        if updates:
            self._deliver(updates)

    def _fail(self, reason: str) -> None:
        """The core broke: every request learns it at once, and later ones are refused."""
        self._failure = reason
        lost = set(self._known)
        while True:
            try:
                message = self._inbox.get(block=False)
            except queue.Empty:
                break
            if isinstance(message, _Add):
                lost.add(message.request.request_id)
        self._deliver([TokenUpdate(i, [], "error", error=reason) for i in sorted(lost)])
