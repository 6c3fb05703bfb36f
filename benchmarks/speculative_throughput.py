"""EAGLE-3 with forced acceptance against vLLM on the same GPU: what a speculative step costs, whatever is drafted.

Random weights of Llama-3.1-8B's shape and of an EAGLE-3 head's (draft vocabulary 32,000), greedy, prompts of 128
tokens, 256 output tokens, end of sequence ignored, prefix caching off, the rate of the decode part. Drafts are accepted
at fixed rates (.730 .521 .355, continued .245 .170 .118 .082), as vLLM's were: THE TEXT MEANS NOTHING. vLLM's column
was measured on an NVIDIA H200 (vLLM 0.26.0, torch 2.11, CUDA 13.0).

    python benchmarks/speculative_throughput.py [--shape llama-3.1-8b] [--batch 1,8,64] [--k 3] [--sweep]
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from slipstream.commands.measure import BatchRun, decode_rate, run_batch
from slipstream.commands.results import collect_results, prepare_folder, write_results
from slipstream.config import EngineOptions
from slipstream.engine.build import build_shape
from slipstream.engine.client import EngineClient
from slipstream.models.shapes import forced_eagle3, shape_config

VLLM = {
    ("llama-3.1-8b", 0): {1: 202, 8: 1574, 64: 10566},
    ("llama-3.1-8b", 3): {1: 388, 8: 2917, 64: 14579},
}


def measure(shape: str, k: int, batches: list[int], output_len: int, repeat: int) -> list[dict[str, Any]]:
    options = EngineOptions(
        device="cuda",
        dtype="bfloat16",
        enable_prefix_caching=False,
        max_num_seqs=max(batches),
        max_model_len=1024,
        speculative_config=forced_eagle3(shape, k) if k else None,
        seed=0,
    )
    client = EngineClient.in_thread(lambda: build_shape(options, shape))
    vocab_size = shape_config(shape)["vocab_size"]
    rows = []
    try:
        for batch in batches:
            rng = random.Random(0)
            prompts = [[rng.randrange(vocab_size) for _ in range(128)] for _ in range(batch)]
            runs: list[BatchRun] = [run_batch(client, prompts, output_len) for _ in range(repeat + 1)][1:]
            best = max(runs, key=lambda run: decode_rate(run.arrivals))
            rate, drafts = decode_rate(best.arrivals), best.drafts
            peer = VLLM.get((shape, k), {}).get(batch)
            rows.append(
                {
                    "case": f"{shape}+eagle3" if k else shape,
                    "batch": batch,
                    "tok_s": round(rate, 1),
                    "k": k,
                    "synthetic": k > 0,
                    "mean_length": round(drafts.mean_length, 3),
                    "step_ms": round(1000 * batch * drafts.mean_length / rate, 3),
                    "vllm_tok_s": peer,
                    "ratio": round(rate / peer, 3) if peer else None,
                }
            )
            print(f"{shape}, k = {k}, batch {batch}: {rate:,.0f} tokens/s", file=sys.stderr, flush=True)
    finally:
        client.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--batch", default="1,8,64")
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--sweep", action="store_true", help="every k from 1 to 7 at the first batch size")
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    prepare_folder(arguments.output_dir)
    batches = [int(size) for size in arguments.batch.split(",")]
    rest = (arguments.output_len, arguments.repeat)
    if arguments.sweep:
        rows = [row for k in range(1, 8) for row in measure(arguments.shape, k, batches[:1], *rest)]
    else:
        rows = [row for k in (0, arguments.k) for row in measure(arguments.shape, k, batches, *rest)]
    results = collect_results(rows, device="cuda")
    table = Table("case", title=f"output tokens per second, forced acceptance, {results.hardware}")
    for name in ("k", "batch", "Slipstream", "vLLM", "ratio", "tokens a step", "ms a step"):
        table.add_column(name, justify="right")
    for row in rows:
        peer = [f"{row['vllm_tok_s']:,}", f"{row['ratio']:.2f}"] if row["vllm_tok_s"] else ["", ""]
        figures = (f"{row['tok_s']:,.0f}", *peer, f"{row['mean_length']:.2f}", f"{row['step_ms']:.2f}")
        table.add_row(row["case"], str(row["k"]), str(row["batch"]), *figures)
    path = write_results(results, arguments.output_dir, f"speculative-throughput-{arguments.shape}")
    Console(width=120).print(table)
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
