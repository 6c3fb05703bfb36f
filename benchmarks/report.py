"""Measure what fits this machine, then bring README.md and docs/benchmarks.md up to date: `make bench-report`.

    python benchmarks/report.py --list           # what would run here, and about how long each takes
    python benchmarks/report.py --only startup   # some of it

Each benchmark runs in a process of its own and writes its result to benchmarks/results/. One that fails is named and
the others go on. Spec-Bench needs its questions: --questions question.jsonl. The pages show an NVIDIA H200 and the
newest CPU; results of other GPUs are kept as files.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import readme

ROOT = Path(__file__).parents[1]
PORT = 8123
SERVER_START_S = 300.0


class Benchmark(NamedTuple):
    part: str  # of docs/benchmarks.md
    arguments: tuple[str, ...]  # of Python
    minutes: int
    server: tuple[str, ...] | None = None  # options of the server that it measures


def _script(name: str, *arguments: str) -> tuple[str, ...]:
    return (f"benchmarks/{name}.py", *arguments)


def _serve(case: str) -> tuple[str, ...]:
    load = ("--concurrency", "1,8,32,128,512", "--prompt-len", "64", "--case", case)
    return ("-m", "slipstream", "bench", "serve", "--url", f"http://127.0.0.1:{PORT}", *load)


ON_A_GPU = (
    Benchmark("decode throughput", _script("decode_throughput"), 4),
    Benchmark("eagle3", _script("speculative_throughput", "--k", "0,3"), 3),
    Benchmark("adaptive lengths", _script("speculative_throughput", "--k", "adaptive", "--rates", "low,zero,high"), 8),
    Benchmark("adaptive lengths", _script("speculative_throughput", "--change"), 2),
    Benchmark("ngram", _script("speculation", "--repeat", "6"), 4),
    Benchmark("acceptance", _script("acceptance", "--prompts", "64"), 2),
    Benchmark("serving", _serve("smollm2-135m+serve"), 4, ("--max-num-seqs", "512", "--speculate", "none")),
    Benchmark("serving", _serve("smollm2-135m+serve+eagle3"), 4, ("--max-num-seqs", "512")),
    Benchmark("arrivals", _script("poisson_arrivals", "--rates", "8"), 2),
    Benchmark("attention", _script("attention"), 1),
    Benchmark("host", _script("host_loop", "--device", "cuda"), 1),
    Benchmark("startup", _script("startup"), 2),
)
ON_A_CPU = (Benchmark("cpu", _script("cpu_vs_transformers"), 6),)


def plan(has_gpu: bool, questions: Path | None, only: Sequence[str]) -> list[Benchmark]:
    chosen = [*(ON_A_GPU if has_gpu else ()), *ON_A_CPU]
    if has_gpu and questions is not None:
        chosen.append(Benchmark("spec bench", _script("spec_bench", "--questions", str(questions)), 20))
    return [benchmark for benchmark in chosen if not only or benchmark.part in only]


@contextmanager
def running_server(options: Sequence[str]) -> Iterator[None]:
    """The default model's, once it takes requests and its graphs have had time to be recorded."""
    command = [sys.executable, "-m", "slipstream", "serve", "smollm2-135m", "--port", str(PORT), "--no-log-requests"]
    with subprocess.Popen([*command, *options], cwd=ROOT) as server:
        try:
            deadline = time.monotonic() + SERVER_START_S
            while server.poll() is None and time.monotonic() < deadline:
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=5) as answer:
                        lines = answer.read().decode().split("\n")
                    if "slipstream_missing_graphs 0.0" in lines:
                        break
                except OSError:
                    pass
                time.sleep(1)
            yield
        finally:
            server.terminate()


def run(benchmark: Benchmark) -> bool:
    command = [sys.executable, *benchmark.arguments, "--output-dir", "benchmarks/results"]
    if benchmark.server is None:
        return subprocess.run(command, cwd=ROOT, check=False).returncode == 0
    with running_server(benchmark.server):
        return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="show what would run, and run nothing")
    parser.add_argument("--only", action="append", default=[], help="a part of the page; may be given several times")
    parser.add_argument("--questions", type=Path, help="Spec-Bench's question.jsonl")
    options = parser.parse_args(arguments)

    import torch

    benchmarks = plan(torch.cuda.is_available(), options.questions, options.only)
    failed = []
    for benchmark in benchmarks:
        print(f"{benchmark.part} (about {benchmark.minutes} min): python {' '.join(benchmark.arguments)}", flush=True)
        if not options.list and not run(benchmark):
            failed.append(benchmark.part)
    if options.list:
        return 0
    if failed:
        print(f"error: no new figures of {', '.join(failed)}; what they printed says why", file=sys.stderr)
    return readme.main() or (1 if failed else 0)


if __name__ == "__main__":
    sys.exit(main())
