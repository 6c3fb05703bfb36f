"""Prompts alone: tokens a second from the submission of a batch to the last of its first tokens.

Random tokens and weights, one output token a request, prefix caching off, best of three after a warm-up. vLLM's column
was measured on an NVIDIA H200 with the Llama-3.1-8B shape in bfloat16; for other shapes there is none.

    python benchmarks/prompts.py [--shape llama-3.1-8b] [--cases 1x2048,8x2048] [--prefer balance,throughput]
    python benchmarks/prompts.py --prompt-kernel tma,pointers     # the kernels of attention over prompts in turn
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from load_runs import Asked, run_load
from slipstream.commands.measure import wait_for_graphs
from slipstream.commands.results import collect_results, prepare_folder, write_results
from slipstream.config import EngineOptions
from slipstream.engine.build import build_shape
from slipstream.engine.client import EngineClient
from slipstream.errors import ConfigError
from vllm_figures import PROMPTS

CASES = "1x2048,1x8192,1x32768,8x2048,32x512"


def parse_cases(text: str) -> list[tuple[int, int]]:
    """Batch and length of the prompts of each case."""
    found = []
    for part in text.split(","):
        batch, _, length = part.partition("x")
        if not (batch.isdigit() and length.isdigit() and int(batch) and int(length)):
            raise ConfigError(f"--cases are such as 1x2048,32x512, not '{text}'")
        found.append((int(batch), int(length)))
    return found


def measure(arguments: argparse.Namespace, setting: dict[str, str]) -> list[dict[str, Any]]:
    cases = parse_cases(arguments.cases)
    options = EngineOptions(
        device=arguments.device,
        dtype="bfloat16" if arguments.device == "cuda" else "auto",
        max_model_len=max(length for _, length in cases) + 1,
        max_num_seqs=max(8, *(batch for batch, _ in cases)),
        block_size=arguments.block_size,
        enable_prefix_caching=False,
        seed=0,
        **setting,  # type: ignore[arg-type]
    )
    client, rows = EngineClient.in_thread(lambda: build_shape(options, arguments.shape)), []
    try:
        wait_for_graphs(client)
        for batch, length in cases:
            asked = [Asked(0.0, length, 1)] * batch
            runs = [run_load(client, asked, seed) for seed in range(arguments.repeat + 1)][1:]
            rates = [batch * length / run.seconds for run in runs]
            peer = PROMPTS.get(arguments.shape, {}).get((batch, length))
            row = {"case": f"{arguments.shape}+prompts", "batch": batch, "prompt_len": length}
            row |= {"tok_s": round(max(rates), 1), "rates": [round(rate, 1) for rate in rates], **setting}
            row |= {"vllm_tok_s": peer, "ratio": round(max(rates) / peer, 3) if peer else None}
            rows.append(row)
            print(f"{batch} x {length:,} {setting}: {max(rates):,.0f} tokens/s", file=sys.stderr, flush=True)
    finally:
        client.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--prefer", default="balance")
    parser.add_argument("--prompt-kernel", default="pointers")
    parser.add_argument("--block-size", type=int, default=16, help="64 or 128 for prompt_kernel tma")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    prepare_folder(arguments.output_dir)
    kernels, preferred = arguments.prompt_kernel.split(","), arguments.prefer.split(",")
    settings = [{"prefer": prefer, "prompt_kernel": kernel} for prefer in preferred for kernel in kernels]
    rows = [row for setting in settings for row in measure(arguments, setting)]
    results = collect_results(rows, device=arguments.device)
    table = Table("prompts", title=f"prompt tokens per second, {arguments.shape}, {results.hardware}")
    for name in ("prefer", "kernel", "Slipstream", "vLLM", "ratio"):
        table.add_column(name, justify="right")
    for row in rows:
        peer = [f"{row['vllm_tok_s']:,}", f"{row['ratio']:.2f}"] if row["vllm_tok_s"] else ["", ""]
        own = (f"{row['batch']} x {row['prompt_len']:,}", row["prefer"], row["prompt_kernel"], f"{row['tok_s']:,.0f}")
        table.add_row(*own, *peer)
    path = write_results(results, arguments.output_dir, f"{arguments.shape}-prompts")
    Console(width=120).print(table)
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
