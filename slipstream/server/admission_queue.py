"""Requests on their way to the engine, first come, first served, without delaying the streams under way.

Small bodies, which are nearly all, are read and tokenised on the event loop, a few milliseconds of them at a time.
Large ones go to threads: one that parses, because parsing holds the GIL, and some that tokenise, which releases it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

from slipstream.server.access_log import RequestNote
from slipstream.server.answer_writer import AnswerPlan, AnswerWriter, WriterContext
from slipstream.server.errors import as_api_error
from slipstream.server.http.exchange import Exchange
from slipstream.server.routes import Route, RouteContext

_SMALL_BODY = 4 << 10
_TURN_S = 0.002
_NUM_TOKENISERS = 4


class AdmissionQueue:
    def __init__(self, routes: RouteContext, writers: WriterContext) -> None:
        self._routes = routes
        self._writers = writers
        self._waiting: deque[tuple[Exchange, Route]] = deque()
        self._is_scheduled = False
        self._reading = ThreadPoolExecutor(1, "slipstream-read")
        self._tokenising = ThreadPoolExecutor(_NUM_TOKENISERS, "slipstream-tokenise")

    def add(self, exchange: Exchange, route: Route) -> None:
        if len(exchange.request.body) > _SMALL_BODY:
            self._run(self._reading, exchange, lambda: route(self._routes, exchange.request), self._tokenise)
            return
        self._waiting.append((exchange, route))
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._admit_waiting)

    def close(self) -> None:
        for executor in (self._reading, self._tokenising):
            executor.shutdown(wait=False, cancel_futures=True)

    def _admit_waiting(self) -> None:
        end = time.monotonic() + _TURN_S
        while self._waiting and time.monotonic() < end:
            exchange, route = self._waiting.popleft()
            if exchange.is_open:
                self._admit(exchange, route)
        self._is_scheduled = bool(self._waiting)
        if self._is_scheduled:
            asyncio.get_running_loop().call_soon(self._admit_waiting)

    def _admit(self, exchange: Exchange, route: Route) -> None:
        try:
            plan = route(self._routes, exchange.request)()
        except Exception as error:
            self._refuse(exchange, error)
        else:
            self._start(exchange, plan)

    def _tokenise(self, exchange: Exchange, resolve: Callable[[], AnswerPlan]) -> None:
        self._run(self._tokenising, exchange, resolve, self._start)

    def _run(
        self, executor: Executor, exchange: Exchange, work: Callable[[], Any], go_on: Callable[[Exchange, Any], None]
    ) -> None:
        """Do the work in a thread, then call ``go_on`` on the event loop if the client is still connected."""
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(executor, lambda: work() if exchange.is_open else None)

        def take(done: asyncio.Future[Any]) -> None:
            if done.cancelled():
                return
            error = done.exception()
            if not exchange.is_open:
                return
            if error is not None:
                self._refuse(exchange, error)
            else:
                go_on(exchange, done.result())

        future.add_done_callback(take)

    def _start(self, exchange: Exchange, plan: AnswerPlan) -> None:
        exchange.drop_body()
        writer = AnswerWriter(self._writers, exchange, plan)
        exchange.note = RequestNote(plan.answer.request_id, plan.generation)
        try:
            writer.start()
        except Exception as error:
            self._refuse(exchange, error)

    def _refuse(self, exchange: Exchange, error: BaseException) -> None:
        refusal = as_api_error(error)
        if refusal.status == 429:
            self._writers.metrics.refuse()
        exchange.respond_json(refusal.status, refusal.body, refusal.headers)
