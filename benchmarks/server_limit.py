"""What HTTP costs: the front end under a fake engine that speaks the wire protocol and never has to compute.

The front end is the real one, in a process of its own. The fake engine gives every stream a token a step, at a pace
that the front end can follow, so that nearly every token is an event of its own; the clients only count. What counts
is the processor time of the front end per streamed token, and per request of one token. Machines differ, so both are
also given as multiples of a fixed piece of Python measured in the same run.

    python benchmarks/server_limit.py [--streams 32,128,512] [--seconds 8] [--front-ends 1]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import zmq

from slipstream.checkpoints.checkpoint import open_checkpoint
from slipstream.checkpoints.hub import resolve_model
from slipstream.config import EngineOptions
from slipstream.device.cpu import CpuDevice
from slipstream.engine.driver import Add, Finish
from slipstream.engine.link import LinkAddress
from slipstream.engine.resolve import resolve
from slipstream.engine.split_updates import UpdateSplitter
from slipstream.engine.stats import EngineStats
from slipstream.engine.wire import Pulse, Ready, Stats, client_address, decode, encode, engine_address
from slipstream.models.registry import architecture_of
from slipstream.output import TokenUpdate, TokenUpdates
from slipstream.sampling_params import SamplingParams
from slipstream.server.counters import SharedCounters
from slipstream.server.front_end_process import COUNTERS, READY, FrontEndTask, open_listener
from slipstream.server.metrics import LAYOUT
from slipstream.server.settings import ServerSettings

MODEL = "smollm2-135m"
OUTPUT_LEN = 128
# About the speed of the engine on an H200, as far as one front end on a slow core can follow.
TOKENS_PER_S = {32: 25_000, 128: 40_000, 512: 60_000}
PROMPT = "Explain in simple words why the sky is blue, and then why it is red when the sun sets. " * 4
TARGET_US, TARGET_ADMISSION_US = 12.0, 400.0
_TICKS = os.sysconf("SC_CLK_TCK")


# --- the fake engine


def run_engine(folder: Path, num_clients: int, tokens_per_s: float) -> None:
    """A process: takes requests, and gives each a token a step until it has all."""
    context = zmq.Context()
    inbox = context.socket(zmq.PULL)
    inbox.setsockopt(zmq.RCVHWM, 0)
    inbox.bind(engine_address(folder, 0))
    clients = []
    for client in range(num_clients):
        outbox = context.socket(zmq.PUSH)
        outbox.setsockopt(zmq.SNDHWM, 0)
        outbox.connect(client_address(folder, client))
        clients.append(outbox)
    splitter = UpdateSplitter(num_clients)
    left: dict[str, int] = {}
    ids: tuple[str, ...] = ()
    due, spoke_at, step = time.monotonic(), 0.0, 0
    while True:
        while inbox.poll(0 if left else 500):
            message = decode(inbox.recv_multipart())
            if isinstance(message, Add):
                request = message.request
                left[request.request_id] = request.max_total_tokens - len(request.prompt_token_ids)
            elif isinstance(message, Finish):
                left.pop(message.request_id, None)
        now = time.monotonic()
        if now - spoke_at > 0.5:
            spoke_at = now
            for outbox in clients:
                outbox.send_multipart(encode(Pulse(0.0)))
                outbox.send_multipart(encode(Stats(EngineStats())))
        if not left:
            continue
        if len(ids) != len(left) or ids != tuple(left):
            ids = tuple(left)
        step += 1
        tokens = [[400 + (7 * step + idx) % 40_000] for idx in range(len(ids))]
        others = {}
        for idx, request_id in enumerate(ids):
            left[request_id] -= 1
            if left[request_id] <= 0:
                others[idx] = TokenUpdate(request_id, tokens[idx], "length", time=now)
                del left[request_id]
        updates = TokenUpdates(ids, tokens, others=others, time=now)
        for client, part in splitter.split(updates):
            clients[client].send_multipart(encode(part))
        due = max(due + len(ids) / tokens_per_s, now)
        if (pause := due - time.monotonic()) > 0:
            time.sleep(pause)


# --- the clients


def run_clients(port: int, num_streams: int, max_tokens: int, seconds: float, results: Connection) -> None:
    """A process: so many connections, each with one stream after the other. Counts events, and times first ones."""
    body = {"messages": [{"role": "user", "content": PROMPT}], "stream": True, "max_tokens": max_tokens}
    raw = json.dumps(body | {"ignore_eos": True, "temperature": 0}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}"
    )
    request = f"{head}\r\n\r\n".encode() + raw
    selector = selectors.DefaultSelector()
    started: dict[socket.socket, float] = {}
    waits: set[socket.socket] = set()
    first_s, num_events, num_requests = [], 0, 0

    def ask(own: socket.socket) -> None:
        started[own] = time.monotonic()
        waits.add(own)
        own.sendall(request)

    for _ in range(num_streams):
        own = socket.create_connection(("127.0.0.1", port))
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        selector.register(own, selectors.EVENT_READ)
        ask(own)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for key, _ in selector.select(0.5):
            own = key.fileobj
            assert isinstance(own, socket.socket)
            data = own.recv(1 << 16)
            if not data:
                raise SystemExit("the server closed a connection")
            if own in waits:
                waits.discard(own)
                first_s.append(time.monotonic() - started[own])
                if b" 200 OK" not in data:
                    raise SystemExit(f"the server said: {data[:500]!r}")
            num_events += data.count(b"data: ")
            if b"[DONE]" in data:
                num_requests += 1
                ask(own)
    results.send((num_events, num_requests, first_s))


# --- the measurement


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def reference_us() -> float:
    """A fixed piece of Python of the kind that a front end runs: the median of many turns, in microseconds."""
    texts = [f"token {i} \u00e9" for i in range(64)]
    times = []
    for _ in range(200):
        start = time.perf_counter()
        parts = []
        for text in texts:
            found = json.encoder.encode_basestring(text).encode()
            parts.append(b"%x\r\n%b\r\n" % (len(found), found))
        b"".join(parts)
        times.append((time.perf_counter() - start) / len(texts))
    return 1e6 * median(times)


class Bench:
    def __init__(self, num_front_ends: int, tokens_per_s: float) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slipstream-"))
        self.context = multiprocessing.get_context("spawn")
        model = resolve_model(MODEL)
        config = open_checkpoint(model).config
        options = EngineOptions(model=str(model), device="cpu", dtype="float32", max_num_seqs=512)
        resolved = resolve(options, CpuDevice().hardware("float32"), architecture_of(config).read_config(config))
        SharedCounters.create(self.folder / COUNTERS, LAYOUT, num_front_ends)
        listener = open_listener("127.0.0.1", 0, is_shared=True)
        self.port = listener.getsockname()[1]
        arguments = (self.folder, num_front_ends, tokens_per_s)
        self.engine = self.context.Process(target=run_engine, args=arguments, daemon=True)
        self.engine.start()
        self.front_ends = []
        for client in range(num_front_ends):
            task = FrontEndTask(
                address=LinkAddress(str(self.folder), client, 0, 300.0),
                ready=Ready(resolved, SamplingParams(), ()),
                model_folder=str(model),
                model_name=MODEL,
                settings=ServerSettings(log_requests=False, shutdown_timeout_s=0),
                port=self.port,
                num_front_ends=num_front_ends,
                parent=os.getpid(),
            )
            command = [sys.executable, "-m", "slipstream.server.front_end_process"]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(task))
            process.stdin.close()
            self.front_ends.append(process)
        for process in self.front_ends:
            assert process.stdout is not None and process.stdout.readline() == READY
        listener.close()

    def cpu(self) -> float:
        return sum(cpu_seconds(process.pid) for process in self.front_ends)

    def run(self, num_streams: int, max_tokens: int, seconds: float) -> dict[str, Any]:
        receiving, sending = self.context.Pipe(duplex=False)
        client = self.context.Process(
            target=run_clients, args=(self.port, num_streams, max_tokens, seconds, sending), daemon=True
        )
        before = self.cpu()
        client.start()
        num_events, num_requests, first_s = receiving.recv()
        used = self.cpu() - before
        client.join()
        first = sorted(first_s)
        tokens = self.tokens_of(num_requests, max_tokens)
        return {
            "num_requests": num_requests,
            "num_tokens": tokens,
            "events_per_token": round((num_events - 2 * num_requests) / max(1, tokens), 3),
            "cpu_s": round(used, 3),
            "tok_s": round(tokens / seconds),
            "ttft_p50_ms": round(1000 * first[len(first) // 2], 2),
            "ttft_p99_ms": round(1000 * first[int(len(first) * 0.99)], 2),
        }

    def tokens_of(self, num_requests: int, max_tokens: int) -> int:
        return num_requests * max_tokens

    def close(self) -> None:
        for process in self.front_ends:
            process.terminate()
            process.wait(20)
        self.engine.terminate()
        self.engine.join()
        shutil.rmtree(self.folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="32,128,512")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--front-ends", type=int, default=1)
    parser.add_argument("--tokens-per-s", type=float, help="pace of the fake engine; by the number of streams if unset")
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()

    from slipstream.commands.results import collect_results, prepare_folder, write_results

    prepare_folder(options.output_dir)
    rows = []
    for num_streams in map(int, options.streams.split(",")):
        pace = options.tokens_per_s or TOKENS_PER_S.get(num_streams, 40_000)
        reference = [reference_us()]
        bench = Bench(options.front_ends, pace)
        try:
            bench.run(num_streams, 8, 2.0)  # a warm-up
            admitted = bench.run(min(num_streams, 32), 1, options.seconds / 2)
            streamed = bench.run(num_streams, OUTPUT_LEN, options.seconds)
        finally:
            bench.close()
        reference.append(reference_us())
        unit = median(reference)
        # A request of one token costs what admission and the end of an answer cost.
        admission_us = 1e6 * admitted["cpu_s"] / admitted["num_requests"]
        per_token_us = 1e6 * streamed["cpu_s"] / streamed["num_tokens"]
        row = {
            "case": "server-limit",
            "batch": num_streams,
            "front_ends": options.front_ends,
            "us_per_token": round(per_token_us, 2),
            "us_per_token_alone": round(per_token_us - admission_us / OUTPUT_LEN, 2),
            "us_per_request": round(admission_us, 1),
            "reference_us": round(unit, 3),
            "per_token_in_references": round(per_token_us / unit, 2),
            "per_request_in_references": round(admission_us / unit, 1),
            "pace_tok_s": pace,
            **{name: streamed[name] for name in ("tok_s", "events_per_token", "ttft_p50_ms", "ttft_p99_ms")},
        }
        rows.append(row)
        print(row, flush=True)
    path = write_results(collect_results(rows, device="cpu"), options.output_dir, "server-limit")
    print(f"{'streams':>8} {'us/token':>9} {'us/request':>11} {'tok/s':>9} {'events/token':>13} {'in references':>14}")
    for row in rows:
        print(
            f"{row['batch']:>8} {row['us_per_token']:>9} {row['us_per_request']:>11} {row['tok_s']:>9} "
            f"{row['events_per_token']:>13} {row['per_token_in_references']:>14}"
        )
    print(f"target at 128 streams: {TARGET_US} us a token, {TARGET_ADMISSION_US} us a request; written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
