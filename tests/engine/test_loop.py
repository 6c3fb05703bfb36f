"""The engine in a thread: nothing is taken that will not be answered."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.config import EngineOptions
from slipstream.engine import loop as loop_module
from slipstream.engine.build import Engine, build_engine
from slipstream.engine.driver import Add, Driver, Finish, Stop
from slipstream.engine.loop import EngineLoop
from slipstream.errors import EngineError
from slipstream.output import TokenUpdates
from tests import tiny_models
from tests.engine.drive import make_request


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tiny_models.build("llama"), tmp_path_factory.mktemp("tiny"))


class Held(queue.SimpleQueue[Any]):
    """Lets a message in only after the loop has failed: between the check for that and the message all may happen."""

    def __init__(self) -> None:
        super().__init__()
        self.may_enter = threading.Event()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        if isinstance(item, Add):
            assert self.may_enter.wait(60)
        super().put(item)


@pytest.mark.parametrize("ends", ["fails", "is closed"])
def test_a_request_beside_the_end_of_the_loop_is_answered(
    folder: Path, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused, or it learns the end: never neither."""
    monkeypatch.setattr("threading.excepthook", lambda args: None)  # the thread's own traceback is expected
    told: queue.SimpleQueue[TokenUpdates] = queue.SimpleQueue()
    held = Held()
    monkeypatch.setattr(loop_module, "queue", SimpleNamespace(SimpleQueue=lambda: held, Empty=queue.Empty))
    loop = EngineLoop(lambda: build_engine(EngineOptions(model=str(folder))), told.put)
    refused: list[str] = []

    def add() -> None:
        try:
            loop.add(make_request("late", [1, 2]))
        except EngineError as error:
            refused.append(str(error))

    adding = threading.Thread(target=add)
    adding.start()
    if ends == "fails":
        assert loop.core is not None
        monkeypatch.setattr(loop.core, "finish", lambda request_id: 1 / 0)
        ending = threading.Thread(target=lambda: (loop.finish("x"), loop._thread.join()))
    else:
        ending = threading.Thread(target=loop.close)
    ending.start()
    ending.join(0.5)  # as far as it comes
    held.may_enter.set()
    adding.join(60)
    ending.join(60)
    assert not adding.is_alive() and not ending.is_alive()
    ended: list[str] = []
    while not refused and not ended:
        ended += told.get(timeout=60).ended  # tokens may come before
    assert bool(refused) is not bool(ended)
    assert set(ended) <= {"late"}


def test_timing_of_steps_gives_way_to_a_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that comes while the engine times steps waits for one of them, not for all."""
    options = EngineOptions(model=str(folder), max_num_seqs=4, speculate="ngram")
    engine: Engine = build_engine(options)
    core, order = engine.core, list[str]()
    messages: list[Any] = [Add(make_request("a", [1, 2], max_tokens=2))]
    first_timed = threading.Event()
    on_device = core.runner.device.seconds_of

    def timed(run: Callable[[], None]) -> float:
        order.append("timed")
        first_timed.set()
        return on_device(run)

    monkeypatch.setattr(core.runner.device, "seconds_of", timed)
    step = core.step
    monkeypatch.setattr(core, "step", lambda: (order.append("step"), step())[1])

    def receive(wait: bool) -> Any:
        if first_timed.is_set() and messages:
            return messages.pop()
        if wait:
            return Stop()
        raise queue.Empty

    Driver(core, receive, lambda updates: None).run()
    assert order[:2] == ["timed", "step"]
    assert order.count("timed") > 2, "what was interrupted is timed later"
    assert core.runner.idle_work.num_left == 0


def test_closing_ends_the_requests_that_have_not_ended_and_no_others(folder: Path) -> None:
    """Neither the one that had its last token nor the one that was finished from outside."""
    core, ended = build_engine(EngineOptions(model=str(folder), max_num_seqs=4)).core, list[str]()
    messages: list[Any] = [Add(make_request("short", [1], max_tokens=1))]
    messages += [Add(make_request(name, [1], max_tokens=400)) for name in ("left", "open")]
    last: list[Any] = [Finish("left"), Stop()]

    def receive(wait: bool) -> Any:
        if messages:
            return messages.pop(0)
        if ended:
            return last.pop(0)
        raise queue.Empty

    driver = Driver(core, receive, lambda updates: ended.extend(updates.ended))
    driver.run()
    assert ended == ["short", "open"]
    assert not driver.known


def test_an_unknown_request_can_be_finished(folder: Path) -> None:
    told: queue.SimpleQueue[TokenUpdates] = queue.SimpleQueue()
    loop = EngineLoop(lambda: build_engine(EngineOptions(model=str(folder))), told.put)
    loop.finish("never heard of")
    loop.add(make_request("a", [1, 2], max_tokens=1))
    assert told.get(timeout=60).ended == ["a"]
    loop._inbox.put(Finish("a"))
    loop.close()
    with pytest.raises(EngineError, match="the engine is closed"):
        loop.add(make_request("b", [1, 2]))


INTERRUPTED = """
import ctypes, sys, time
from slipstream import LLM

libc = ctypes.CDLL(None)
# What runs when libraries are torn down, beside a thread in the middle of their code.
libc.__cxa_atexit(ctypes.cast(libc.abort, ctypes.c_void_p), None, None)

def build():
    print("loading", flush=True)
    time.sleep(600)

try:
    LLM(build=build)
except KeyboardInterrupt:
    print("interrupted")
    sys.exit(130)
"""


def test_ctrl_c_while_the_engine_loads_ends_the_process_in_good_order() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "loading\n"
            process.send_signal(signal.SIGINT)
            said, errors = process.communicate(timeout=120)
        finally:
            process.kill()
    assert (process.returncode, said, errors) == (130, "interrupted\n", "")
