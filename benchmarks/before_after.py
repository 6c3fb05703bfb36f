"""Two checkouts on one machine, in turns: what a change of the code did to decoding, start-up and the host's loop.

Each checkout runs its engines in a process of its own. For every case both are built, one after the other, and then
take turns, so that a machine that is faster at one time than at another is so for both. Greedy, prompts of 128 tokens,
random weights of a shape; with drafts an EAGLE-3 head of random weights whose drafts are accepted at fixed rates: THE
TEXT MEANS NOTHING. Medians are compared, bests are shown beside them.

    git worktree add ../before main~20
    python benchmarks/before_after.py --before ../before [--case llama-3.1-8b,smollm2-135m] [--k 0,3] [--batch 1,8,64]
    python benchmarks/before_after.py --before ../before --device cpu --case smollm2-135m --k 0 --batch 1,8
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

LIMITS = {"llama-3.1-8b": 0.015, "smollm2-135m": 0.02}  # of decoding, as a share
MAX_STARTUP, MAX_HOST_US = 0.05, 3.0
PROMPT_LEN = 128


def serve(case: str, k: int, batches: list[int], device: str) -> None:
    """The child's side: build an engine, report the seconds, then answer lines ``batch output_len`` with figures."""
    began = time.perf_counter()
    from slipstream.commands.measure import decode_rate, run_batch, wait_for_graphs
    from slipstream.config import EngineOptions
    from slipstream.engine.build import build_shape
    from slipstream.engine.client import EngineClient
    from slipstream.models.shapes import FORCED_RATES, forced_eagle3, shape_config

    options = EngineOptions(
        device=device,
        dtype="bfloat16" if device == "cuda" else "float32",
        enable_prefix_caching=False,
        max_num_seqs=max(batches),
        max_model_len=1024,
        gpu_memory_utilization=0.4,  # there are two
        speculative_config=forced_eagle3(case, k) if k else None,
        seed=0,
    )
    verifiers: list[Any] = []

    def build() -> Any:
        engine = build_shape(options, case)
        runner = engine.core.runner
        # Checkouts from before heads of steps have it in the program.
        verifiers.append(runner.head.generate.verifier if hasattr(runner, "head") else runner.program.verifier)
        return engine

    client = EngineClient.in_thread(build)
    if k:
        verifiers[0].set_rates(FORCED_RATES[:k])
    rng, vocab_size = random.Random(0), shape_config(case)["vocab_size"]
    prompts = [[rng.randrange(vocab_size) for _ in range(PROMPT_LEN)] for _ in range(max(batches))]
    run_batch(client, prompts[:1], 4)
    print(json.dumps({"startup_s": time.perf_counter() - began}), flush=True)
    wait_for_graphs(client)
    for line in sys.stdin:
        batch, output_len = map(int, line.split())
        before = client.stats.num_steps, client.stats.host_s.total
        run = run_batch(client, prompts[:batch], output_len)
        steps, host_s = client.stats.num_steps - before[0], client.stats.host_s.total - before[1]
        print(json.dumps({"tok_s": decode_rate(run.arrivals), "host_us": 1e6 * host_s / steps}), flush=True)
    client.close()


class Side:
    """The parent's end of one checkout's engine."""

    def __init__(self, tree: Path, arguments: argparse.Namespace, case: str, k: int) -> None:
        command = [sys.executable, __file__, "--serve", case, "--k", str(k), "--batch", arguments.batch]
        environment = {**os.environ, "PYTHONPATH": str(tree.resolve())}
        self._child = subprocess.Popen(
            [*command, "--device", arguments.device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=tree,
        )
        self.startup_s: float = self._read()["startup_s"]

    def _read(self) -> dict[str, float]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise SystemExit(f"an engine died with exit code {self._child.wait()}")
        found: dict[str, float] = json.loads(line)
        return found

    def measure(self, batch: int, output_len: int) -> dict[str, float]:
        assert self._child.stdin is not None
        self._child.stdin.write(f"{batch} {output_len}\n")
        self._child.stdin.flush()
        return self._read()

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()


def compare(arguments: argparse.Namespace, case: str, k: int) -> list[dict[str, Any]]:
    trees = {"before": arguments.before, "after": arguments.after}
    # The first build of each compiles kernels, which is not what is asked.
    for tree in trees.values() if arguments.startups > 1 else ():
        Side(tree, arguments, case, k).close()
    sides: dict[str, Side] = {}
    startups: dict[str, list[float]] = {name: [] for name in trees}
    for turn in range(arguments.startups):
        for name, tree in trees.items():
            side = Side(tree, arguments, case, k)
            startups[name].append(side.startup_s)
            if turn + 1 < arguments.startups:
                side.close()
            else:
                sides[name] = side
    rows = []
    for batch in map(int, arguments.batch.split(",")):
        found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        for _ in range(arguments.turns + 1):
            for name, side in sides.items():
                found[name].append(side.measure(batch, arguments.output_len))
        rows.append(row_of(case, k, batch, {name: runs[1:] for name, runs in found.items()}, startups))
        print(describe(rows[-1]), flush=True)
    for side in sides.values():
        side.close()
    return rows


def row_of(
    case: str, k: int, batch: int, found: dict[str, list[dict[str, float]]], startups: dict[str, list[float]]
) -> dict[str, Any]:
    row: dict[str, Any] = {"case": f"{case}+before-after" + ("+eagle3" if k else ""), "batch": batch, "k": k}
    for name, runs in found.items():
        rates = [run["tok_s"] for run in runs]
        row |= {f"{name}_tok_s": round(median(rates), 1), f"{name}_best_tok_s": round(max(rates), 1)}
        row |= {f"{name}_tok_s_runs": [round(rate, 1) for rate in rates]}
        row |= {f"{name}_host_us": round(median(run["host_us"] for run in runs), 1)}
        row |= {f"{name}_startup_s": round(median(startups[name]), 2)}
    row["tok_s"] = row["after_tok_s"]
    row["ratio"] = round(row["after_tok_s"] / row["before_tok_s"], 4)
    row["startup_ratio"] = round(row["after_startup_s"] / row["before_startup_s"], 3)
    row["host_us_more"] = round(row["after_host_us"] - row["before_host_us"], 1)
    limit = LIMITS.get(case, 0.02)
    row["within_limits"] = row["ratio"] >= 1 - limit and row["host_us_more"] <= MAX_HOST_US
    return row


def describe(row: dict[str, Any]) -> str:
    rates = f"{row['before_tok_s']:,.0f} -> {row['after_tok_s']:,.0f} tokens/s ({row['ratio']:.4f})"
    bests = f"bests {row['before_best_tok_s']:,.0f} -> {row['after_best_tok_s']:,.0f}"
    host = f"host {row['before_host_us']:.0f} -> {row['after_host_us']:.0f} us a step"
    start = f"start {row['before_startup_s']:.1f} -> {row['after_startup_s']:.1f} s"
    return f"{row['case']}, k = {row['k']}, batch {row['batch']}: {rates}, {bests}, {host}, {start}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="the folder of the other checkout")
    parser.add_argument("--after", type=Path, default=Path(__file__).parent.parent)
    parser.add_argument("--case", default="llama-3.1-8b,smollm2-135m")
    parser.add_argument("--k", default="0,3")
    parser.add_argument("--batch", default="1,8,64")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--startups", type=int, default=3, help="builds of each engine whose time is taken")
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, int(arguments.k), list(map(int, arguments.batch.split(","))), arguments.device)
        return 0
    if arguments.before is None or not (arguments.before / "slipstream").is_dir():
        parser.error("--before must be the folder of another checkout")

    from slipstream.commands.results import collect_results, prepare_folder, write_results

    prepare_folder(arguments.output_dir)
    rows: list[dict[str, Any]] = []
    for case in arguments.case.split(","):
        for k in map(int, arguments.k.split(",")):
            rows += compare(arguments, case, k)
    path = write_results(collect_results(rows, device=arguments.device), arguments.output_dir, "before-after")
    print("\n".join(describe(row) for row in rows))
    print(f"written to {path}")
    return 0 if all(row["within_limits"] and row["startup_ratio"] <= 1 + MAX_STARTUP for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
