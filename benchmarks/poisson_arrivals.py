"""What a reader of tokens feels while others arrive: times between tokens under Poisson arrivals.

Requests come at random, independently of each other, with prompts of random lengths; each asks for the same number of
tokens. Shown for every rate: time to the first token and time between tokens, their medians and 99th percentiles, with
prompts cut to what decoding requests can bear (the default) and with prompts that take all of a step.

    python benchmarks/poisson_arrivals.py [--shape llama-3.1-8b] [--rates 2,8] [--seconds 10] [--device cuda]
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from slipstream.commands.results import collect_results, prepare_folder, write_results
from slipstream.config import EngineOptions
from slipstream.engine.build import build_shape
from slipstream.engine.client import EngineClient
from slipstream.output import RequestOutput, TokenUpdates
from slipstream.sampling_params import SamplingParams

PROMPT_LENS = (64, 2048)


class Watch:
    """When each request came, and when its tokens did."""

    def __init__(self) -> None:
        self.came: dict[str, float] = {}
        self.tokens: dict[str, list[float]] = {}

    def see(self, updates: TokenUpdates) -> None:
        for request_id, new in zip(updates.request_ids, updates.token_ids, strict=True):
            self.tokens.setdefault(request_id, []).extend([updates.time] * len(new))

    def figures(self) -> dict[str, float]:
        first = [1e3 * (self.tokens[i][0] - self.came[i]) for i in self.came]
        between = np.concatenate([1e3 * np.diff(times) for times in self.tokens.values()])
        span = max(times[-1] for times in self.tokens.values()) - min(self.came.values())
        found = {"tok_s": sum(map(len, self.tokens.values())) / span}
        for name, values in (("first_token_ms", first), ("between_tokens_ms", between)):
            for percent in (50, 99):
                found[f"{name}_p{percent}"] = float(np.percentile(values, percent))
        return {name: round(value, 2) for name, value in found.items()}


def run(client: EngineClient, rate: float, seconds: float, output_len: int, vocab_size: int) -> dict[str, float]:
    rng, watch, left = random.Random(0), Watch(), threading.Semaphore(0)
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)

    def done(_output: RequestOutput) -> None:
        left.release()

    with client.tapped(watch.see):
        begin = due = time.monotonic()
        while due - begin < seconds:
            prompt = [rng.randrange(vocab_size) for _ in range(rng.randint(*PROMPT_LENS))]
            request = client.prepare(prompt, params)
            time.sleep(max(0.0, due - time.monotonic()))
            watch.came[request.request_id] = time.monotonic()
            client.submit(request, done, every_token=False)
            due += rng.expovariate(rate)
        for _ in watch.came:
            left.acquire()
    return watch.figures()


def measure(shape: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for setting, prefer in (("default", "balance"), ("whole steps", "throughput")):
        options = EngineOptions(
            device=arguments.device,
            dtype="bfloat16" if arguments.device == "cuda" else "auto",
            max_model_len=PROMPT_LENS[1] + arguments.output_len,
            prefer=prefer,
            enable_prefix_caching=False,
        )
        client = EngineClient.in_thread(lambda options=options: build_shape(options, shape))
        try:
            vocab_size = client.config.model.vocab_size
            run(client, max(arguments.rates), 1.0, 16, vocab_size)  # kernels are compiled, caches are filled
            for rate in arguments.rates:
                found = run(client, rate, arguments.seconds, arguments.output_len, vocab_size)
                size = min(client.config.scheduler.mixed_prefill_tokens, client.config.scheduler.max_num_batched_tokens)
                about = {"case": shape, "rate": rate, "prompts": setting, "mixed_prefill_tokens": size}
                rows.append({**about, "batch": client.config.scheduler.max_num_seqs, **found})
                print(f"{shape}, {rate} requests/s, {setting}: {found}", file=sys.stderr, flush=True)
        finally:
            client.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", help="may be given several times; both known ones if unset")
    parser.add_argument("--rates", default="4,16", help="requests a second")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    arguments.rates = [float(rate) for rate in arguments.rates.split(",")]
    prepare_folder(arguments.output_dir)
    rows = [row for shape in arguments.shape or ["smollm2-135m", "llama-3.1-8b"] for row in measure(shape, arguments)]
    table = Table(title="milliseconds, Poisson arrivals")
    shown = [name for name in rows[0] if name != "batch"]
    for name in shown:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(str(row[name]) for name in shown))
    path = write_results(collect_results(rows, device=arguments.device), arguments.output_dir, "poisson-arrivals")
    Console(width=150).print(table)
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
