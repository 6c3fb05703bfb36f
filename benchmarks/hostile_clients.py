"""Clients that would take a server down, while others are served: half-open connections, huge bodies, broken HTTP.

Everything is sent to a server that this script starts, on this machine. Each case says what the others were given
meanwhile; the script ends with 1 if a client was kept out, waited too long or got an error of the server's.

    python benchmarks/hostile_clients.py [--model smollm2-135m] [--requests 10000]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

DESCRIPTORS = 1024
NUM_HALF_OPEN = 2000
NUM_LARGE = 8
NUM_ROUNDS = 5
BODY_BYTES = 4_000_000
MOST_P99_S = 0.2
TIMEOUT_S = 20.0
ANSWER_S = 0.3  # for a request that is not whole, where the server waits for the rest


@dataclass
class Target:
    """A server and what it is asked while it is under attack."""

    host: str
    port: int
    prompt: Any = "Hello"
    headers: str = ""

    async def send(self, data: bytes, ends: bool = True) -> bytes:
        """All that comes back, until the server closes; ``ends``: no more will be sent."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(data)
            first = b""
            if ends:
                # Nothing more comes, which ends a request that is not whole. Said at once, it would look like a client
                # that has left, and a good request would have no answer.
                with contextlib.suppress(TimeoutError):
                    first = await asyncio.wait_for(reader.read(1), ANSWER_S)
                writer.write_eof()
            return first + await asyncio.wait_for(reader.read(), TIMEOUT_S)
        except ConnectionError:
            return b""
        finally:
            writer.close()

    def post(self, path: str, body: bytes) -> bytes:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{self.headers}"
        return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body

    async def ask(self) -> tuple[int, float]:
        """A short completion on a connection of its own: its status and its seconds."""
        body = json.dumps({"prompt": self.prompt, "max_tokens": 2, "ignore_eos": True}).encode()
        start = time.monotonic()
        answer = await self.send(self.post("/v1/completions", body), ends=False)
        return status_of(answer), time.monotonic() - start


def status_of(answer: bytes) -> int:
    found = re.match(rb"HTTP/1\.1 (\d+) ", answer)
    return int(found[1]) if found else 0


# --- broken requests


def broken_request(draw: random.Random, target: Target) -> bytes:
    """HTTP as no client should send it: a whole request with faults in its lines, its lengths or its bytes."""
    body = draw.choice(
        [b"", b"{", b"null", b'{"prompt": "x", "max_tokens": 1}', b"\x00\xff" * draw.randint(1, 40), b"[" * 2000]
    )
    path = draw.choice(["/health", "/v1/models", "/v1/completions", "/v1/chat/completions", "/tokenize", "/", "*", ""])
    method = draw.choice(["GET", "POST", "PUT", "HEAD", "OPTIONS", "DELETE", "CONNECT", "get", "", "G\x00T", "X" * 100])
    version = draw.choice(["HTTP/1.1"] * 6 + ["HTTP/1.0", "HTTP/2.0", "HTTP/0.9", "HTTP/1.1 ", "http/1.1", ""])
    lines = [f"{method} {path} {version}", "Host: x", *target.headers.splitlines()]
    lengths = [len(body), 0, len(body) + 5, max(0, len(body) - 3), -1, 10**12, 10**30]
    for _ in range(draw.randint(0, 3)):
        lines.append(
            draw.choice(
                [
                    f"Content-Length: {draw.choice(lengths)}",
                    "Transfer-Encoding: chunked",
                    "Transfer-Encoding: gzip, chunked",
                    "Transfer-Encoding: chunked, identity",
                    "Connection: close",
                    "Connection: upgrade\r\nUpgrade: h2c",
                    "Expect: 100-continue",
                    "Content-Type: application/json",
                    "X: " + "y" * draw.choice([1, 1000, 70_000]),
                    "no colon here",
                    " folded: line",
                    ": empty name",
                    "Bad\x01Name: x",
                    "X-Request-Id: " + draw.choice(["\x7f", "a b", "z" * 300, "\u00e9"]),
                ]
            )
        )
    end = draw.choice(["\r\n"] * 6 + ["\n", "\r", "\r\n\r\n"])
    raw = end.join(lines).encode("latin-1", "replace") + (end * 2).encode()
    if "chunked" in raw.decode("latin-1"):
        size = draw.choice([b"%x" % len(body), b"-1", b"fffffffffffffffff", b"zz", b"%x;ext=1" % len(body), b""])
        body = size + b"\r\n" + body + draw.choice([b"\r\n0\r\n\r\n", b"\r\n", b"", b"\r\n0\r\nTrailer: x\r\n\r\n"])
    raw += body
    if draw.random() < 0.3:
        raw = raw[: draw.randint(0, len(raw))]
    if draw.random() < 0.3 and raw:
        changed = bytearray(raw)
        for _ in range(draw.randint(1, 5)):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        raw = bytes(changed)
    return raw * draw.choice([1, 1, 1, 1, 2, 5])


@dataclass
class Outcome:
    statuses: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


async def send_broken(target: Target, num_requests: int, seed: int = 0, at_once: int = 32) -> Outcome:
    """Every connection ends, and no answer is an error of the server's."""
    outcome = Outcome()
    numbers = iter(range(num_requests))

    async def work() -> None:
        for number in numbers:
            raw = broken_request(random.Random(f"{seed} {number}"), target)
            try:
                answer = await target.send(raw)
            except TimeoutError:
                outcome.faults.append(f"request {number} hangs: {raw[:200]!r}")
                continue
            except OSError as error:
                outcome.faults.append(f"request {number}: {error}")
                continue
            found = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d\d\d) ", answer)]
            outcome.statuses.update(found or [0])
            if any(status >= 500 for status in found):
                outcome.faults.append(f"request {number} is answered with {found}: {raw[:200]!r}")

    await asyncio.gather(*(work() for _ in range(at_once)))
    return outcome


# --- others, meanwhile


async def with_others(target: Target, attack: Callable[[], Awaitable[None]]) -> tuple[Counter[int], list[float]]:
    """What clients get that come one after the other while the attack lasts."""
    statuses: Counter[int] = Counter()
    seconds: list[float] = []
    attacking = asyncio.ensure_future(attack())
    while not attacking.done():
        status, elapsed = await target.ask()
        statuses[status] += 1
        seconds.append(elapsed)
        await asyncio.sleep(0.01)
    await attacking
    return statuses, seconds


async def open_half(target: Target, count: int, hold_s: float) -> None:
    """Connections that begin a request and never end it, from a process of their own."""
    code = f"from hostile_clients import hold_half; hold_half({target.host!r}, {target.port}, {count}, {hold_s})"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, cwd=Path(__file__).parent)
    assert await process.wait() == 0


def hold_half(host: str, port: int, count: int, hold_s: float) -> None:
    allow_descriptors()
    own = []
    try:
        for i in range(count):
            client = socket.create_connection((host, port), timeout=5)
            own.append(client)
            client.sendall([b"", b"GET /health HT", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"][i % 3])
            if i % 20 == 19:
                time.sleep(0.005)
        time.sleep(hold_s)
    finally:
        for client in own:
            client.close()


async def send_large(target: Target, count: int, num_bytes: int) -> list[int]:
    """Bodies full of bad words, all at once."""
    words = ["w"] * ((num_bytes - 100) // 5)
    body = json.dumps({"prompt": "x", "bad_words": words}, separators=(", ", ": ")).encode()
    answers = await asyncio.gather(
        *(target.send(target.post("/v1/completions", body), ends=False) for _ in range(count))
    )
    return [status_of(answer) for answer in answers]


# --- the script


def allow_descriptors() -> None:
    """As many as this script itself needs."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (8192 if hard == resource.RLIM_INFINITY else min(hard, 8192), hard))


def start_server(model: str) -> tuple[subprocess.Popen[str], Target]:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))

    command = [sys.executable, "-m", "slipstream", "serve", model, "--port", "0", "--speculate", "none"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=limit)
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"serving .* on http://(\S+):(\d+)", line):
            return process, Target(found[1], int(found[2]))
    raise SystemExit("the server did not start")


def count_descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def p99(seconds: list[float]) -> float:
    return quantiles(seconds, n=100)[-1] if len(seconds) > 1 else max(seconds)


async def run_cases(target: Target, pid: int, num_requests: int) -> list[dict[str, Any]]:
    rows = []
    for _ in range(5):
        await target.ask()
    before = count_descriptors(pid)

    async def quiet() -> None:
        await asyncio.sleep(5.0)

    statuses, seconds = await with_others(target, quiet)
    rows.append({"case": "no attack", "others": dict(statuses), "p99_ms": round(1000 * p99(seconds), 1)})
    statuses, seconds = await with_others(target, lambda: open_half(target, NUM_HALF_OPEN, 3.0))
    rows.append({"case": "half-open", "others": dict(statuses), "p99_ms": round(1000 * p99(seconds), 1)})

    async def large() -> None:
        for _ in range(NUM_ROUNDS):  # one after the other, for the others' times to be many
            found = await send_large(target, NUM_LARGE, BODY_BYTES)
            assert set(found) == {400}, found

    statuses, seconds = await with_others(target, large)
    rows.append({"case": "large bodies", "others": dict(statuses), "p99_ms": round(1000 * p99(seconds), 1)})
    outcome = await send_broken(target, num_requests)
    rows.append(
        {"case": "broken requests", "statuses": dict(sorted(outcome.statuses.items())), "faults": outcome.faults}
    )
    await asyncio.sleep(3.0)
    rows.append({"case": "afterwards", "descriptors": count_descriptors(pid), "before": before})
    return rows


def find_failures(rows: list[dict[str, Any]]) -> list[str]:
    by_case = {row["case"]: row for row in rows}
    found = [
        f"{case}: others got {by_case[case]['others']}"
        for case in by_case
        if set(by_case[case].get("others", [200])) != {200}
    ]
    if by_case["large bodies"]["p99_ms"] > 1000 * MOST_P99_S:
        found.append(f"large bodies: others waited {by_case['large bodies']['p99_ms']} ms")
    found += by_case["broken requests"]["faults"]
    if by_case["afterwards"]["descriptors"] > by_case["afterwards"]["before"] + 2:
        found.append(f"descriptors were leaked: {by_case['afterwards']}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=10_000)
    options = parser.parse_args()
    allow_descriptors()
    process, target = start_server(options.model)
    stderr = process.stderr
    assert stderr is not None
    num_bytes = [0]

    def read() -> None:
        for line in stderr:
            num_bytes[0] += len(line)

    threading.Thread(target=read, daemon=True).start()
    try:
        rows = asyncio.run(run_cases(target, process.pid, options.requests))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    for row in rows:
        print(row)
    print(f"the log has {num_bytes[0]:,} bytes")
    failures = find_failures(rows)
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
