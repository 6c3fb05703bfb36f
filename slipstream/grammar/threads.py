"""The threads that grammars are compiled in, and the one that fills masks while a step's forward pass runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from slipstream.grammar.interface import Task

_NUM_COMPILERS = 2


class WorkerThreads:
    """The library releases the interpreter lock, so one thread of ours is enough to keep its own threads busy."""

    def __init__(self) -> None:
        self._compilers = ThreadPoolExecutor(_NUM_COMPILERS, "slipstream-compile")
        self._filler = ThreadPoolExecutor(1, "slipstream-masks")

    def compile(self, work: Callable[[], Any]) -> Task:
        return self._compilers.submit(work)

    def fill(self, work: Callable[[], Any]) -> Task:
        return self._filler.submit(work)

    def wait(self, task: Task, timeout_s: float) -> bool:
        assert isinstance(task, Future)
        return bool(wait((task,), timeout_s).done)
