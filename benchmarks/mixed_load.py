"""Prompts beside decodes: how long a load takes, and what a reader of its tokens feels meanwhile.

Four loads, each for every setting of the engine:

- ``burst``: 256 requests at once, prompts of 100 to 2,000 and outputs of 50 to 400 tokens (269,006 in, 57,033 out),
  the figure of vLLM on an NVIDIA H200 beside it;
- ``poisson``: the same requests at random times, a third as many a second as the plain burst could serve;
- ``idle``: the first token of one prompt of 2,048 tokens on an idle engine;
- ``among-long``: the first tokens of short prompts that arrive while four of 32,768 tokens are in work.

Settings: ``default``; ``throughput`` (``prefer`` of that name); ``constant`` (the policy before: a fixed number of
prompt tokens beside decodes, oldest prompts first); ``apart`` (``mixed_attention`` of that name); ``tma`` (that
``prompt_kernel``, pages of 64); any with ``+eagle3``, a head of the shape with an adaptive draft length and drafts
accepted at .730 .521 .355 and on, WHATEVER THEY SAY: its text means nothing. Its rows have the draft length over time.

On a CPU all engines are open and take turns; on a GPU they come one after the other. Best of three after a warm-up.

    python benchmarks/mixed_load.py [--shape llama-3.1-8b] [--rows 256,128] [--settings default,throughput,constant]
    python benchmarks/mixed_load.py --device cpu --shape smollm2-135m --rows 8 --requests 16 --loads burst,poisson
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from load_runs import Asked, Run, among_long, burst, poisson, run_load
from slipstream.commands.measure import wait_for_graphs
from slipstream.commands.results import collect_results, prepare_folder, write_results
from slipstream.config import EngineOptions
from slipstream.engine.build import build_shape
from slipstream.engine.client import EngineClient
from slipstream.models.load import Placement, measure_model
from slipstream.models.registry import architecture_of
from slipstream.models.shapes import FORCED_RATES, forced_drafts, shape_config
from vllm_figures import MIXED_SECONDS

SHARE_OF_CAPACITY = 1 / 3
KERNELS: dict[str, dict[str, Any]] = {
    "apart": {"mixed_attention": "apart"},
    "tma": {"prompt_kernel": "tma", "block_size": 64},
}
LOADS = ("burst", "poisson", "idle", "among-long")


def constant_tokens(shape: str) -> int:
    """Prompt tokens beside decodes before they followed a limit in time: about 20 ms of a Hopper GPU."""
    config = shape_config(shape)
    architecture, placement = architecture_of(config), Placement(torch.device("cpu"), torch.bfloat16)
    size = measure_model(architecture, architecture.read_config(config), placement)
    tokens = int(6e12 / max(1, size.num_params))
    return max(256, 1 << (tokens.bit_length() - 1))


def options_of(setting: str, arguments: argparse.Namespace, num_rows: int) -> EngineOptions:
    policy, _, method = setting.partition("+")
    kernels = KERNELS.get(policy, {})
    policy = "default" if kernels else policy
    longest = max(arguments.prompt_lens[1] + arguments.output_lens[1], 2048 + 16)
    if "among-long" in arguments.loads:
        longest = max(longest, arguments.long_len + 16)
    options = EngineOptions(
        device=arguments.device,
        dtype="bfloat16" if arguments.device == "cuda" else "auto",
        max_num_seqs=num_rows,
        max_model_len=longest,
        enable_prefix_caching=False,
        max_itl_ms=arguments.max_itl_ms if policy == "default" else None,
        prefer="balance" if policy == "default" else "throughput",
        mixed_prefill_tokens=constant_tokens(arguments.shape) if policy == "constant" else None,
        seed=0,
        **kernels,
    )
    if method:
        speculative = forced_drafts(method, arguments.shape, len(FORCED_RATES))
        options = replace(options, speculative_config={**speculative, "adaptive": True})
    return options


class Contestant:
    """One engine with its setting."""

    def __init__(self, setting: str, arguments: argparse.Namespace, num_rows: int) -> None:
        self.setting, self.num_rows = setting, num_rows
        options = options_of(setting, arguments, num_rows)
        self.client = EngineClient.in_thread(lambda: build_shape(options, arguments.shape))
        wait_for_graphs(self.client)

    def row(self, shape: str, load: str, runs: list[Run]) -> dict[str, Any]:
        best = min(runs, key=lambda run: run.seconds)
        firsts = best.first_token_ms()
        row = {"case": f"{shape}+mixed", "batch": self.num_rows, "setting": self.setting, "load": load}
        row |= {"seconds": round(best.seconds, 3), "all_seconds": [round(run.seconds, 3) for run in runs]}
        row |= {"tok_s": round(best.num_out / best.seconds, 1), "tokens_out": best.num_out}
        row |= {"tokens_in": sum(one.prompt_len for one in best.asked), "requests": len(best.asked)}
        row |= {f"itl_p{percent}_ms": round(best.percentile_ms(percent), 2) for percent in (50, 99)}
        row |= {f"first_token_p{percent}_ms": round(float(np.percentile(firsts, percent)), 2) for percent in (50, 99)}
        if "+" in self.setting:
            row |= {"synthetic": True, "draft_lengths": best.lengths}
        return row


def measure(arguments: argparse.Namespace, num_rows: int, settings: list[str]) -> list[dict[str, Any]]:
    """All of these settings in turns, so that a drift of the machine concerns them all."""
    contestants, rows = [Contestant(setting, arguments, num_rows) for setting in settings], []

    def turns(load: str, asked_of: Callable[[str], list[Asked]]) -> list[list[Run]]:
        runs: list[list[Run]] = [[] for _ in contestants]
        for turn in range(arguments.repeat + 1):
            for contestant, own in zip(contestants, runs, strict=True):
                own.append(run_load(contestant.client, asked_of(contestant.setting), turn))
        return [own[1:] for own in runs]

    def note(load: str, runs: list[list[Run]]) -> None:
        for contestant, own in zip(contestants, runs, strict=True):
            rows.append(contestant.row(arguments.shape, load, own))
            row = rows[-1]
            text = f"{row['setting']}, {num_rows} rows, {load}: {row['seconds']:.2f} s, p99 {row['itl_p99_ms']:.1f} ms"
            print(text, file=sys.stderr, flush=True)

    asked = burst(arguments.requests, arguments.prompt_lens, arguments.output_lens)
    try:
        plain = arguments.capacity
        if "burst" in arguments.loads:
            runs = turns("burst", lambda _: asked)
            note("burst", runs)
            plain = plain or len(asked) / min(run.seconds for run in runs[0])
        if "poisson" in arguments.loads:
            assert plain is not None, "give --capacity, requests a second, where no burst is measured"
            arguments.capacity = plain  # of the first setting measured, so that all have the same arrivals
            note("poisson", turns("poisson", lambda _: poisson(asked, plain * SHARE_OF_CAPACITY)))
        if "idle" in arguments.loads:
            note("idle", turns("idle", lambda _: [Asked(0.0, arguments.idle_len, 4)]))
        if "among-long" in arguments.loads:
            note("among-long", measure_among_long(contestants, arguments, rows))
    finally:
        for contestant in contestants:
            contestant.client.close()
    return rows


def measure_among_long(
    contestants: list[Contestant], arguments: argparse.Namespace, rows: list[dict[str, Any]]
) -> list[list[Run]]:
    """Short prompts come while the long ones take so long alone; their own first tokens are a row of their own."""
    found = []
    for contestant in contestants:
        alone = run_load(contestant.client, [Asked(0.0, arguments.long_len, 4)] * arguments.num_long)
        within = (0.05 * alone.seconds, 0.9 * alone.seconds)
        lens = arguments.short_lens
        asked = among_long(arguments.num_long, arguments.long_len, arguments.num_short, lens, within)
        runs = [run_load(contestant.client, asked, turn) for turn in range(1, arguments.repeat + 1)]
        firsts = np.concatenate([run.first_token_ms(lens[1]) for run in runs])
        row = contestant.row(arguments.shape, "among-long, short prompts", runs)
        for percent in (50, 99):
            row[f"first_token_p{percent}_ms"] = round(float(np.percentile(firsts, percent)), 2)
        rows.append(row)
        found.append(runs)
    return found


def pair(text: str) -> tuple[int, int]:
    low, _, high = text.partition(",")
    return int(low), int(high)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--rows", default="256,128", help="running requests at most")
    parser.add_argument("--settings", default="default,throughput,constant,default+eagle3")
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt-lens", type=pair, default=(100, 2000))
    parser.add_argument("--output-lens", type=pair, default=(50, 400))
    parser.add_argument("--capacity", type=float, help="requests a second, for poisson; of the first burst if unset")
    parser.add_argument("--max-itl-ms", type=float, help="for the setting default")
    parser.add_argument("--idle-len", type=int, default=2048)
    parser.add_argument("--long-len", type=int, default=32768)
    parser.add_argument("--num-long", type=int, default=4)
    parser.add_argument("--num-short", type=int, default=40)
    parser.add_argument("--short-lens", type=pair, default=(32, 256))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    arguments.loads = arguments.loads.split(",")
    if unknown := set(arguments.loads) - set(LOADS):
        parser.error(f"--loads are of {', '.join(LOADS)}, not {', '.join(sorted(unknown))}")
    return arguments


def main() -> int:
    arguments = parse()
    prepare_folder(arguments.output_dir)
    settings, rows = arguments.settings.split(","), []
    for num_rows in map(int, arguments.rows.split(",")):
        groups = [settings] if arguments.device == "cpu" else [[setting] for setting in settings]
        own = [row for group in groups for row in measure(arguments, num_rows, group)]
        peer = MIXED_SECONDS.get(arguments.shape, {}).get(num_rows)
        is_peers = arguments.requests == 256 and sum(row["tokens_in"] for row in own[:1]) == 269_006
        for row in own:
            row["vllm_seconds"] = peer if is_peers and row["load"] == "burst" else None
        rows += own
    results = collect_results(rows, device=arguments.device)
    table = Table("setting", title=f"mixed load, {arguments.shape}, {results.hardware}")
    shown = ("load", "batch", "seconds", "vllm_seconds", "itl_p50_ms", "itl_p99_ms", "first_token_p99_ms")
    for name in shown:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(row["setting"], *("" if row[name] is None else str(row[name]) for name in shown))
    path = write_results(results, arguments.output_dir, f"{arguments.shape}-mixed-load")
    Console(width=150).print(table)
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
