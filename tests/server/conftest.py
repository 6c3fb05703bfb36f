"""A real server in a process of its own, with a tiny model that has a chat template."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from slipstream.checkpoints.checkpoint import open_checkpoint
from slipstream.text.tokenizer import Tokenizer
from tests import tiny_models

from .scripted import ScriptedServer

MODEL_NAME = "tiny"


@dataclass
class RunningServer:
    process: subprocess.Popen[str]
    url: str
    lines: list[str] = field(default_factory=list)  # of standard error
    reader: threading.Thread = field(default_factory=threading.Thread)

    @property
    def engine_pid(self) -> int:
        """The engine is the server's only child; whichever thread started it."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        children = [pid for task in tasks for pid in task.read_text().split()]
        return next(int(pid) for pid in children if b"engine.worker" in Path(f"/proc/{pid}/cmdline").read_bytes())

    @contextmanager
    def engine_at_rest(self) -> Iterator[None]:
        """No step is made inside this, however fast the machine is."""
        pid = self.engine_pid
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def connect(self) -> socket.socket:
        parts = urlsplit(self.url)
        return socket.create_connection((parts.hostname or "", parts.port or 0), timeout=60)

    def send(self, body: dict[str, Any], *headers: str) -> socket.socket:
        """Ask for a completion; the answer is the caller's to read, or to leave."""
        content = json.dumps(body).encode()
        lines = ["POST /v1/completions HTTP/1.1", "Host: x", f"Content-Length: {len(content)}", *headers, "", ""]
        client = self.connect()
        client.sendall("\r\n".join(lines).encode() + content)
        return client

    def wait_until_open(self, num_completions: int, timeout_s: float = 60.0) -> None:
        """As many continuations as this have been given to the engine and have not ended; it need not be running."""
        deadline = time.monotonic() + timeout_s
        while self.metric("open_completions") != num_completions:
            assert time.monotonic() < deadline, self._metrics()
            time.sleep(0.02)

    def num_aborted(self) -> float:
        found = re.search(r'^slipstream_completions_total\{reason="abort"\} (.*)$', self._metrics(), re.MULTILINE)
        return float(found[1]) if found else 0.0

    def _metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics", timeout=60).text

    def metric(self, name: str) -> float:
        found = re.search(rf"^slipstream_{name} (.*)$", self._metrics(), re.MULTILINE)
        assert found, f"no metric {name}"
        return float(found[1])

    def wait_until_idle(self, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while self.metric("running") or self.metric("waiting") or self.metric("free_pages") != self.metric("pages"):
            assert time.monotonic() < deadline, self._metrics()
            time.sleep(0.1)

    def wait_for_line(self, text: str, timeout_s: float = 60.0) -> str:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for line in self.lines:
                if text in line:
                    return line
            time.sleep(0.05)
        raise AssertionError(f"'{text}' was not said: {self.lines[-20:]}")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        assert self.process.stderr is not None
        self.reader.join(60)
        self.process.stderr.close()


def start_server(folder: Path, *options: str) -> RunningServer:
    command = [sys.executable, "-m", "slipstream", "serve", str(folder), "--port", "0"]
    command += ["--served-model-name", MODEL_NAME, "--max-num-seqs", "8", *options]
    if "--api-server-count" not in options:
        command += ["--api-server-count", "1"]  # else a machine with many cores has several, each with lines of its own
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    server = RunningServer(process, "")
    assert process.stderr is not None
    stderr = process.stderr

    def read() -> None:
        for line in stderr:
            server.lines.append(line.rstrip("\n"))

    server.reader = threading.Thread(target=read, daemon=True)
    server.reader.start()
    server.url = server.wait_for_line("serving", 120).rpartition(" on ")[2]
    return server


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model = tiny_models.build("llama")
    model.config.is_matryoshka = True
    tiny_models.save(model, folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    """One token a byte, and a few special ones."""
    return open_checkpoint(model_folder).tokenizer()


@pytest.fixture(scope="session")
def server(model_folder: Path) -> Iterator[RunningServer]:
    running = start_server(model_folder, "--seed", "1")
    yield running
    running.stop()


@pytest.fixture
def scripted(tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    """Everything but the engine, without a socket; it answers "abc"."""
    running = ScriptedServer(tokenizer, [("a", 0, 0), ("bc", 0, 0)])
    yield running
    running.close()
