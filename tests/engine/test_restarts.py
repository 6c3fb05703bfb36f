"""Restarts of the engine's process, with processes that do what a test says: no engine runs here, so nothing races."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from slipstream.checkpoints.checkpoint import open_checkpoint
from slipstream.config import EngineOptions
from slipstream.engine import supervisor
from slipstream.engine.driver import Stop
from slipstream.engine.link import EngineLink, LinkAddress
from slipstream.engine.process import EngineProcess
from slipstream.engine.pulse import PulseMonitor
from slipstream.engine.resolve import resolve
from slipstream.engine.stats import EngineStats
from slipstream.engine.supervisor import open_push
from slipstream.engine.wire import EngineBack, EngineLost, Ready, Refused, Stats, client_address, encode
from slipstream.errors import EngineError
from slipstream.output import TokenUpdate, TokenUpdates
from slipstream.sampling_params import SamplingParams
from slipstream.server.front_end_process import link_address
from slipstream.text.tokenizer import Tokenizer
from tests.engine.drive import make_request
from tests.test_config import CPU, MODEL

READY = Ready(resolve(EngineOptions(), CPU, MODEL), SamplingParams(), ())
RESTARTING = "the engine is being restarted; try again in a moment"


class ScriptedChild:
    """Replaces an engine process: it sends given messages, and lives until it is told to end.

    What the real one tells its clients goes out by the socket that the client has bound.
    """

    process = SimpleNamespace(pid=1)

    def __init__(self, *messages: Any) -> None:
        self.exit_code: int | None = None
        self.generation = 0
        self.num_sync_violations = 0
        self.monitor = PulseMonitor(300.0)
        self.client: zmq.Socket[bytes] | None = None
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for message in messages:
            self.say(message)

    def start(self, context: zmq.Context[zmq.Socket[bytes]], folder: Path, generation: int) -> ScriptedChild:
        self.generation = generation
        self.client = open_push(context, client_address(folder, 0))
        return self

    def say(self, message: Any) -> None:
        self._messages.put(message)

    def tell_client(self, message: Any) -> None:
        assert self.client is not None
        if isinstance(message, Stats):
            self.num_sync_violations = message.stats.num_sync_violations
        self.client.send_multipart(encode(message))

    def die(self) -> None:
        self.exit_code = -9

    @property
    def is_alive(self) -> bool:
        return self.exit_code is None

    def send(self, message: Any) -> None:
        if isinstance(message, Stop):
            self.exit_code = 0

    def receive(self) -> Any:
        try:
            return self._messages.get(timeout=0.01)
        except queue.Empty:
            return None

    def read_last_messages(self) -> None:
        pass

    def end(self, timeout_s: float = 0.0) -> None:
        self.exit_code = self.exit_code or 0


class Pause:
    """A pause between two tries lasts until the test ends it."""

    def __init__(self) -> None:
        self.lengths: list[float] = []
        self._may_go_on = threading.Semaphore(0)

    def wait(self, seconds: float) -> None:
        self.lengths.append(seconds)
        self._may_go_on.acquire(timeout=60)

    def set(self) -> None:
        self._may_go_on.release()


class Bench:
    def __init__(self, folder: Path, children: list[ScriptedChild], monkeypatch: pytest.MonkeyPatch) -> None:
        left = iter(children)
        self._context = zmq.Context()

        def start(options: Any, folder: Path, generation: int, *_: Any) -> ScriptedChild:
            return next(left).start(self._context, folder, generation)

        monkeypatch.setattr(supervisor, "_Child", start)
        self.delivered: queue.SimpleQueue[TokenUpdates] = queue.SimpleQueue()
        self.running = EngineProcess(EngineOptions(model=str(folder)), self.delivered.put)
        self.pause = self.running.supervisor._pause = Pause()  # type: ignore[assignment]

    def close(self) -> None:
        self.running.close()
        self._context.destroy(linger=0)


Start = Callable[..., Bench]


@pytest.fixture
def start(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    made: list[Bench] = []

    def start_with(*children: ScriptedChild) -> Bench:
        made.append(Bench(tiny_folder, list(children), monkeypatch))
        return made[-1]

    yield start_with
    for bench in made:
        bench.close()


@pytest.fixture
def tokenizer(tiny_folder: Path) -> Tokenizer:
    return open_checkpoint(tiny_folder).tokenizer()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def violations(count: int) -> Stats:
    return Stats(EngineStats(num_sync_violations=count))


def test_sync_violations_are_summed_over_restarts(start: Start) -> None:
    """Each engine counts its own from zero; the sum is there before the next one has said anything."""
    first, second, third = (ScriptedChild(READY) for _ in range(3))
    running = start(first, second, third).running
    first.tell_client(violations(2))
    wait_until(lambda: running.stats.num_sync_violations == 2)
    first.die()
    wait_until(lambda: running.num_restarts == 1)
    assert running.stats.num_sync_violations == 2, "before the next engine has said anything"
    for count in (1, 3):
        second.tell_client(violations(count))
        wait_until(lambda count=count: running.stats.num_sync_violations == 2 + count)  # type: ignore[misc]
    second.die()
    wait_until(lambda: running.num_restarts == 2)
    assert running.stats.num_sync_violations == 5
    third.tell_client(violations(1))
    wait_until(lambda: running.stats.num_sync_violations == 6)


def test_a_failure_to_restart_is_told_until_a_restart_succeeds(start: Start) -> None:
    """Tries are further and further apart; what hindered an earlier restart is not told of a later one."""
    refusal = Refused("ConfigError", "no memory is left")
    first, fourth, last = ScriptedChild(READY), ScriptedChild(READY), ScriptedChild()
    bench = start(first, ScriptedChild(refusal), ScriptedChild(refusal), fourth, last)
    running = bench.running
    assert running.trouble is None
    first.die()
    for num_tries in (1, 2):
        wait_until(lambda num_tries=num_tries: len(bench.pause.lengths) == num_tries)  # type: ignore[misc]
        wait_until(lambda: running.trouble == "the engine cannot be restarted: no memory is left")
        with pytest.raises(EngineError, match="no memory is left"):
            running.add(make_request("a", [1]))
        bench.pause.set()
    wait_until(lambda: running.is_ready)
    assert bench.pause.lengths == [1.0, 2.0]
    assert running.trouble is None
    assert running.num_restarts == 1
    fourth.die()
    wait_until(lambda: not running.is_ready)
    assert running.trouble == RESTARTING
    last.say(READY)
    wait_until(lambda: running.is_ready)


def test_a_dead_engine_has_lost_the_requests_that_it_had_not_ended(start: Start) -> None:
    """Those that have ended, by the engine or from outside, are not kept: nothing is told of them a second time."""
    first = ScriptedChild(READY)
    bench = start(first, ScriptedChild(READY))
    for request_id in ("ended", "left", "open", "waiting"):
        bench.running.add(make_request(request_id, [1]))
    first.tell_client(TokenUpdates.from_list([TokenUpdate("ended", [5], "length"), TokenUpdate("open", [6])]))
    assert bench.delivered.get(timeout=60).ended == ["ended"]
    bench.running.finish("left")
    assert bench.running.link.known == {"open", "waiting"}
    first.die()
    lost = bench.delivered.get(timeout=60)
    assert lost.ended == ["open", "waiting"]
    for update in lost:
        assert update.finish_reason == "abort"
        assert update.error == ("the engine process ended with code -9; it is being restarted, send the request again")
    wait_until(lambda: bench.running.num_restarts == 1)
    assert bench.delivered.empty()
    assert not bench.running.link.known


def address_in(bench: Bench) -> LinkAddress:
    """Of a client that starts now. No other client has its number, so it receives what the test sends."""
    return link_address(bench.running.supervisor, client=1, incarnation=1)


def test_a_client_that_starts_while_there_is_no_engine(start: Start, tokenizer: Tokenizer) -> None:
    """Requests would wait for ever in front of an engine that could not be started."""
    refusal = Refused("ConfigError", "no memory is left")
    first, third = ScriptedChild(READY), ScriptedChild(READY)
    bench = start(first, ScriptedChild(refusal), third)
    first.tell_client(violations(2))
    first.die()
    wait_until(lambda: len(bench.pause.lengths) == 1)
    link = EngineLink(address_in(bench), READY, tokenizer, bench.delivered.put)
    try:
        assert not link.is_ready and link.trouble == RESTARTING
        with pytest.raises(EngineError, match="try again"):
            link.add(make_request("a", [1]))
        link.handle(EngineBack(2, 1, READY))
        link.add(make_request("a", [1]))
        assert link.is_ready and link.num_restarts == 1
        bench.pause.set()
        wait_until(lambda: bench.running.is_ready)
    finally:
        link.close()


def test_a_client_that_starts_after_a_restart(start: Start, tokenizer: Tokenizer) -> None:
    """It counts what the others count, and what its forerunner was told too late does not upset it."""
    first, second = ScriptedChild(READY), ScriptedChild(READY)
    bench = start(first, second)
    first.tell_client(violations(2))
    first.die()
    wait_until(lambda: bench.running.num_restarts == 1)
    link = EngineLink(address_in(bench), READY, tokenizer, bench.delivered.put)
    try:
        assert link.is_ready and link.num_restarts == 1
        link.add(make_request("a", [1]))
        assert link.stats.num_sync_violations == bench.running.stats.num_sync_violations == 2
        link.handle(EngineLost(0, "it died", 2))
        link.handle(EngineBack(1, 1, READY))
        assert link.is_ready and link.num_restarts == 1 and link.known == {"a"}
        link.handle(EngineLost(1, "it died", 2))
        assert not link.is_ready and not link.known
    finally:
        link.close()
