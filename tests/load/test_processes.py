from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from slipstream.errors import RequestError
from slipstream.load.processes import Progress, client_processes, share_out
from slipstream.load.records import OK, UNFINISHED
from slipstream.load.target import Target
from slipstream.load.worker import Task
from slipstream.load.workload import BodyFormat, Synthetic
from tests.load.scripted import ScriptedServer, answer_words, scripted_server
from tests.load.wire import plain

FORMAT = BodyFormat("chat", "m", temperature=0.0, ignore_eos=True, include_usage=True)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as running:
        yield running


def tasks(server: ScriptedServer, *, processes: int, requests: int, warmup: int = 0, **more: Any) -> list[Task]:
    target = Target.parse(server.url)

    def task(rank: int, indices: range, warmups: range) -> Task:
        load = {"streams": 2, "due": (), **more}
        return Task(target, FORMAT, Synthetic("1", 12, 5), indices, warmups=warmups, timeout_s=30.0, **load)

    return share_out(processes, task, requests, warmup)


def never() -> bool:
    return False


def test_requests_are_dealt_out(server: ScriptedServer) -> None:
    shares = tasks(server, processes=3, requests=8, warmup=2)
    assert [list(task.indices) for task in shares] == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert [list(task.warmups) for task in shares] == [[0], [1], []]


def test_two_processes_send_every_request_once(server: ScriptedServer) -> None:
    seen: list[Progress] = []
    with client_processes(tasks(server, processes=2, requests=9, warmup=3)) as processes:
        assert processes.warm_up(never)
        assert len(server.bodies) == 3
        records = processes.measure(seen.append, never)
    assert (records.outcome == OK).all()
    assert records.output_tokens.tolist() == [5] * 9
    assert records.num_events.tolist() == [5] * 9
    assert len(records.event_times) == 45
    assert len(records.cpu) == 2
    # Both begin at the time that both were told.
    assert np.sort(records.start)[:4].max() < 60.0
    assert records.start.min() >= 0.0
    prompts = [body["messages"][0]["content"] for body in server.bodies]
    assert len(set(prompts)) == 12  # warming up has prompts of its own
    expected = {Synthetic("1", 12, 5).request(idx).prompt for idx in range(9)}
    assert set(prompts[3:]) == expected


def test_a_warm_up_that_fails_says_why() -> None:
    refusal = plain("400 Bad Request", b'{"error": {"message": "unknown field ignore_eos"}}')
    with (
        scripted_server(lambda _: refusal) as server,
        client_processes(tasks(server, processes=1, requests=1, warmup=1)) as processes,
        pytest.raises(RequestError, match=r"HTTP 400: unknown field ignore_eos; --no-ignore-eos leaves that field out"),
    ):
        processes.warm_up(never)


def test_stopping_hands_in_what_there_is() -> None:
    answered = 0

    def answer(body: dict[str, Any]) -> bytes | None:
        nonlocal answered
        answered += 1
        return answer_words(body) if answered <= 3 else None

    with scripted_server(answer) as server:
        with client_processes(tasks(server, processes=1, requests=10)) as processes:
            assert processes.warm_up(never)
            records = processes.measure(lambda _: None, lambda: answered >= 5)
        assert sorted(records.outcome.tolist()) == [UNFINISHED] * 2 + [OK] * 3


def test_stopping_during_the_warm_up() -> None:
    with scripted_server(lambda _: None) as server:
        with client_processes(tasks(server, processes=1, requests=1, warmup=1)) as processes:
            assert not processes.warm_up(lambda: bool(server.bodies))
        assert len(server.bodies) == 1


def test_a_process_that_dies_is_an_error(server: ScriptedServer) -> None:
    with client_processes(tasks(server, processes=1, requests=1)) as processes:
        process = processes._workers[0]._process
        process.send_signal(signal.SIGKILL)
        with pytest.raises(RequestError, match=r"a client process died \(exit code -9\)"):
            processes.warm_up(never)


def test_a_process_does_not_outlive_its_parent() -> None:
    with scripted_server(lambda _: None) as server:
        code = (
            "import sys; from tests.load.test_processes import *\n"
            "class There: url = sys.argv[1]\n"
            "with client_processes(tasks(There, processes=1, requests=2)) as processes:\n"
            "    processes.warm_up(never)\n"
            "    processes.measure(lambda _: None, never)\n"
        )
        command = [sys.executable, "-c", code, server.url]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
            while len(server.bodies) < 2:
                assert parent.poll() is None
                time.sleep(0.01)
            parent.kill()
            # The client process has the same standard output: it ends when both are gone.
            assert parent.communicate(timeout=20) == (b"", None)


def test_the_client_needs_no_torch() -> None:
    code = (
        "import sys, slipstream.load.worker, slipstream.load.plots, slipstream.commands.bench_serve\n"
        "sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
