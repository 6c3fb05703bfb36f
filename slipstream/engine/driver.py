"""The engine loop: messages in, steps, collected tokens out. The same in a thread and in its own process."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from slipstream.engine.core import EngineCore
from slipstream.errors import RequestError
from slipstream.output import TokenUpdate, TokenUpdates
from slipstream.request import Request

Deliver = Callable[[TokenUpdates], None]


@dataclass(frozen=True, slots=True)
class Add:
    request: Request


@dataclass(frozen=True, slots=True)
class Finish:
    request_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Message = Add | Finish | Stop
Receive = Callable[[bool], Message]  # waits if the argument is true, else raises queue.Empty when there is none


class Driver:
    """Owns the core: no other code may touch it. ``deliver`` is called between steps."""

    def __init__(self, core: EngineCore, receive: Receive, deliver: Deliver) -> None:
        self._core = core
        self._receive = receive
        self._deliver = deliver
        self.known: set[str] = set()  # requests that have not ended for their client
        self._is_preparing = True
        self._early: deque[Message] = deque()  # that arrived during idle work

    def run(self) -> None:
        """Run until a ``Stop`` arrives."""
        with torch.inference_mode():
            while self._take_messages():
                if self._core.has_work:
                    self._deliver_updates(self._core.step())

    def _take_messages(self) -> bool:
        """Handle the messages that have arrived; wait for one only when there is nothing to compute. False to end."""
        while True:
            try:
                # With nothing to compute, idle work is possible, but a message comes first.
                is_idle = not self._core.has_work and not self._is_preparing
                message = self._early.popleft() if self._early else self._receive(is_idle)
            except queue.Empty:
                if self._core.has_work:
                    return True
                self._is_preparing = self._core.use_idle_time(self._has_message)
                continue
            if isinstance(message, Stop):
                ends = [TokenUpdate(i, [], "abort", error="the engine was closed") for i in sorted(self.known)]
                self._deliver_updates(TokenUpdates.from_list(ends))
                return False
            if isinstance(message, Finish):
                self._core.finish(message.request_id)
                self.known.discard(message.request_id)
            else:
                self._add(message.request)

    def _has_message(self) -> bool:
        if not self._early:
            try:
                self._early.append(self._receive(False))
            except queue.Empty:
                return False
        return True

    def _add(self, request: Request) -> None:
        try:
            self._core.add(request)
            self.known.add(request.request_id)
        except RequestError as error:
            self._deliver(TokenUpdates.from_list([TokenUpdate(request.request_id, [], "error", error=str(error))]))

    def _deliver_updates(self, updates: TokenUpdates) -> None:
        if updates:
            self.known.difference_update(updates.ended)
            self._deliver(updates)
