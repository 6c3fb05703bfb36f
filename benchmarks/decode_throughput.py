"""Plain decoding against vLLM on the same GPU: the workload of its published figures, beside the bandwidth limit.

Greedy, prompts of 128 tokens, 256 output tokens, end of sequence ignored, prefix caching off, best of three, the rate
of the decode part. vLLM's column was measured on an NVIDIA H200 (vLLM 0.26.0, torch 2.11, CUDA 13.0); on another GPU
compare with a figure of your own. The limit is the time to read the weights, and the cache at its mean length, once a
step; of experts those that the tokens of a step choose, which is counted in a run of its own and shown beside the
number that uniform choice would touch.

    python benchmarks/decode_throughput.py [--case smollm2-135m] [--model FILE] [--batch 1,8] [--repeat 3]
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from experts_touched import mean_touched, step_bytes, touched_by_uniform_choice, watched_choices
from slipstream.commands.bench import Workload, measure_batch, result_row
from slipstream.commands.results import collect_results, prepare_folder, write_results
from slipstream.config import DTYPE_BYTES, EngineOptions
from slipstream.engine.build import build_engine, build_shape
from slipstream.engine.client import EngineClient
from slipstream.llm import LLM
from slipstream.models.load import Placement, measure_model
from slipstream.models.registry import architecture_of
from slipstream.models.shapes import shape_config
from slipstream.sampling_params import SamplingParams
from vllm_figures import PLAIN

# Cases without a figure of vLLM's come after those that have one.
CASES: dict[str, dict[int, int | None]] = {**PLAIN, "deepseek-v2-lite": dict.fromkeys((1, 8, 64))}


def copy_bandwidth() -> float:
    """Bytes a second of a large copy on the device, reads and writes counted."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return 2 * source.numel() / sorted(times)[len(times) // 2]


def count_touched(case: str, options: EngineOptions, workload: Workload) -> dict[int, float]:
    """Mean number of experts of a layer that a step touches, by batch, without graphs. Empty where there are none."""
    config = architecture_of(shape_config(case)).read_config(shape_config(case))
    if config.experts is None:
        return {}
    rng, touched = random.Random(0), {}
    with LLM(build=lambda: build_shape(replace(options, cudagraph_mode="none"), case)) as llm:
        for batch in workload.batches:
            prompts = [[rng.randrange(config.vocab_size) for _ in range(workload.prompt_len)] for _ in range(batch)]
            with watched_choices(batch) as found:
                llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
            touched[batch] = mean_touched(found)
    return touched


def limit(case: str, batch: int, workload: Workload, bandwidth: float, num_touched: float | None) -> float:
    """Tokens a second if a step did nothing but read weights and cache."""
    architecture = architecture_of(shape_config(case))
    model = architecture.read_config(shape_config(case))
    if num_touched is not None:
        num_bytes = step_bytes(case, "bfloat16", num_touched)
    else:
        num_bytes = measure_model(architecture, model, Placement(torch.device("cuda"), torch.bfloat16)).num_bytes
        if not model.tie_embeddings:  # a table of which a step reads a few rows
            num_bytes -= model.vocab_size * model.hidden_size * DTYPE_BYTES["bfloat16"]
    length = workload.prompt_len + workload.output_len / 2
    num_bytes += batch * length * model.kv_bytes_per_token("bfloat16")
    return batch * bandwidth / num_bytes


def measure(case: str, options: EngineOptions, workload: Workload, bandwidth: float) -> list[dict[str, Any]]:
    is_file = options.model != case
    client = EngineClient.in_thread(lambda: build_engine(options) if is_file else build_shape(options, case))
    rows, touched = [], {} if is_file else count_touched(case, options, workload)
    try:
        for batch in workload.batches:
            before = client.stats
            steps, host = before.num_steps, before.host_s.total
            runs = measure_batch(client, workload, batch, seed=0)
            row = result_row(case, batch, workload, client.config, runs, weights="model" if is_file else "random")
            after = client.stats
            peer, top = CASES[case].get(batch), limit(case, batch, workload, bandwidth, touched.get(batch))
            if batch in touched:
                config = client.config.model
                row |= {
                    "experts_touched": round(touched[batch], 2),
                    "experts_touched_uniform": round(touched_by_uniform_choice(config, batch), 2),
                    "share_of_limit": round(row["tok_s"] / top, 3),
                }
            row |= {
                "vllm_tok_s": peer,
                "ratio": round(row["tok_s"] / peer, 3) if peer else None,
                "limit_tok_s": round(top, 1),
                "of_limit": round(row["tok_s"] / top, 3),
                "host_us_per_step": round(1e6 * (after.host_s.total - host) / (after.num_steps - steps), 1),
            }
            rows.append(row)
            print(f"{case}, batch {batch}: {row['tok_s']:,.0f} tokens/s", file=sys.stderr, flush=True)
    finally:
        client.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, help="one case instead of all")
    parser.add_argument("--model", help="a checkpoint of the case, instead of random weights of its shape")
    parser.add_argument("--batch", help="batch sizes, such as 1,8; those of the figures if unset")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    prepare_folder(arguments.output_dir)
    bandwidth = copy_bandwidth()
    rows: list[dict[str, Any]] = []
    for case in [arguments.case] if arguments.case else CASES:
        batches = arguments.batch or ",".join(map(str, CASES[case]))
        workload = Workload.parse(batches, prompt_len=128, output_len=arguments.output_len, repeat=arguments.repeat)
        options = EngineOptions(model=arguments.model or case, device="cuda", dtype="bfloat16", seed=0)
        rows += measure(case, replace(workload.fit(options), max_model_len=None), workload, bandwidth)
    table = Table(
        "case", title=f"output tokens per second, {torch.cuda.get_device_name()}, {bandwidth / 1e12:.2f} TB/s"
    )
    names = ("batch", "Slipstream", "vLLM", "ratio", "bandwidth limit", "of it", "host us a step", "experts touched")
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        peer = [f"{row['vllm_tok_s']:,}", f"{row['ratio']:.2f}"] if row["vllm_tok_s"] else ["", ""]
        share = [f"{row['limit_tok_s']:,.0f}", f"{row['of_limit']:.2f}", f"{row['host_us_per_step']:.0f}"]
        own = f"{row['experts_touched']} of {row['experts_touched_uniform']}" if "experts_touched" in row else ""
        table.add_row(row["case"], str(row["batch"]), f"{row['tok_s']:,.0f}", *peer, *share, own)
    path = write_results(collect_results(rows, device="cuda"), arguments.output_dir, "decode-throughput")
    Console(width=120).print(table)
    print(f"written to {path}")
    return 0 if all(row["ratio"] is None or row["ratio"] >= 1 for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
