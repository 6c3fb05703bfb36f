"""What becomes of front ends that cannot be started; the rest is tested with real ones (``test_front_ends.py``)."""

from __future__ import annotations

import itertools
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.config import EngineOptions
from slipstream.engine.resolve import resolve
from slipstream.engine.supervisor import EngineState
from slipstream.engine.wire import Ready
from slipstream.sampling_params import SamplingParams
from slipstream.server import front_end_group
from slipstream.server.front_end_group import FrontEndGroup
from slipstream.server.settings import ServerSettings
from tests.test_config import CPU, MODEL

READY = Ready(resolve(EngineOptions(), CPU, MODEL), SamplingParams(), ())


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(front_end_group, "time", made)
    return made


@pytest.fixture
def group(tmp_path: Path) -> Iterator[FrontEndGroup]:
    supervisor: Any = SimpleNamespace(
        folder=tmp_path,
        num_clients=1,
        step_timeout_s=300.0,
        model="nothing",
        ready=READY,
        state=lambda: EngineState(0, True, 0, 0, READY),
    )
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        yield FrontEndGroup("tiny", ServerSettings(), supervisor, listener)


def test_without_memory_for_another_process_the_server_goes_on(
    group: FrontEndGroup, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And tries again, less and less often."""
    tries: list[float] = []

    def refuse(*_: Any, **__: Any) -> None:
        tries.append(clock.now)
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(front_end_group, "subprocess", SimpleNamespace(Popen=refuse, PIPE=subprocess.PIPE))
    for _ in range(1000):
        group._replace_dead()
        clock.now += 0.05
    gaps = [after - before for before, after in itertools.pairwise(tries)]
    assert len(tries) >= 5 and gaps == sorted(gaps) and gaps[0] < 1 and gaps[-1] > 10
    assert caplog.text.count("front end 0 cannot be started: Cannot allocate memory") == len(tries)
