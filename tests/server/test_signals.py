"""Signals to the server while it loads, and to its engine while it serves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from .conftest import RunningServer


@pytest.mark.parametrize("moment", ["at once", "with an engine process"])
def test_sigterm_while_loading_leaves_nothing(model_folder: Path, tmp_path: Path, moment: str) -> None:
    """Neither the engine's process nor the folder of its sockets, and no trace on standard error."""
    command = [sys.executable, "-m", "slipstream", "serve", str(model_folder), "--port", "0"]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    deadline = time.monotonic() + 60
    expected = "slipstream-*/watch-0" if moment == "with an engine process" else "slipstream-*"
    while not list(tmp_path.glob(expected)):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    children: list[int] = []
    while moment == "with an engine process" and not children:
        children = [
            int(pid)
            for task in Path(f"/proc/{process.pid}/task").glob("*/children")
            for pid in task.read_text().split()
        ]
        assert time.monotonic() < deadline
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 143
    assert "Traceback" not in said
    assert not list(tmp_path.glob("slipstream-*"))
    deadline = time.monotonic() + 60
    for pid in children:  # one that the signal met while it was started ends by itself, when it finds no server
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < deadline, "the engine loads on"
            time.sleep(0.05)


def test_health_tells_of_an_engine_that_does_not_answer(server: RunningServer) -> None:
    health = f"{server.url}/health"
    assert httpx.get(health).status_code == 200
    with server.engine_at_rest():
        deadline = time.monotonic() + 60
        while (answer := httpx.get(health)).status_code == 200:
            assert time.monotonic() < deadline, "a hung engine was not noticed"
            time.sleep(0.1)
        assert answer.status_code == 503
        assert "the engine process has not answered for" in answer.json()["error"]["message"]
    deadline = time.monotonic() + 60
    while httpx.get(health).status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)
