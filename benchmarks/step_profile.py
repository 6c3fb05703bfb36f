"""Where a decode step's time goes on a GPU: host microseconds, kernels by name, and the gaps between them.

A kernel that starts early counts from its start, so the times of neighbours add up to more than the step.

python benchmarks/step_profile.py [--shape smollm2-135m] [--batch 1,128] [--k 3 [--ngram] | --rejected] [--trace FOLDER]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from slipstream.config import EngineOptions
from slipstream.engine.build import build_shape
from slipstream.models.shapes import FORCED_RATES, HEAD_SHAPES, SHAPES, forced_eagle3, step_bytes
from slipstream.request import Request
from slipstream.sampling_params import SamplingParams

NUM_STEPS = 30
GROUPS = {
    "delta nets": ("_recurrent_kernel", "_conv_kernel", "_scan_kernel", "_gated_norm_kernel"),
    "experts": ("_route_kernel", "_group_kernel", "_gate_up_kernel", "_down_kernel", "_combine_kernel"),
    "products": ("_tile_kernel", "_vector_kernel", "_held_kernel", "nvjet", "gemm", "splitKreduce", "cutlass"),
    "attention": ("_decode_kernel", "attention"),
    "sampling": ("_draw_kernel", "_accept_kernel", "_force_kernel", "argmax", "_find_kernel"),
    "norms": ("_rms_norm", "_scale_kernel", "_gated_kernel", "_join_kernel", "_keep_kernel"),
    "inputs": ("_prepare", "_pass_kernel", "_rotation", "_gaps", "_commit", "_place", "ndexSelect"),
}


def device_ranges(prof: Any) -> list[tuple[str, float, float]]:
    """Kernels and copies on the GPU as (name, start, end) in microseconds, in order."""
    found = []
    for event in prof.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found.append((event.name, event.time_range.start, event.time_range.end))
    return sorted(found, key=lambda r: r[1])


def covered(ranges: list[tuple[str, float, float]]) -> float:
    """How long anything ran: kernels that start early overlap the one before them."""
    total, end = 0.0, 0.0
    for _, begin, own_end in ranges:
        total += max(0.0, own_end - max(begin, end))
        end = max(end, own_end)
    return total


def own_times(ranges: list[tuple[str, float, float]]) -> list[tuple[str, float]]:
    """Of every kernel, how much later the GPU was done because of it: from the end of those before to its own."""
    found, end = [], 0.0
    for name, begin, own_end in ranges:
        found.append((name, max(0.0, own_end - max(begin, end))))
        end = max(end, own_end)
    return found


def group_of(name: str) -> str:
    return next((group for group, parts in GROUPS.items() if any(part in name for part in parts)), "other")


def print_groups(
    ranges: list[tuple[str, float, float]], shape: str, batch: int, k: int, ngram: bool, context: int
) -> None:
    """Time, bytes that have to be moved, and the share of the memory's bandwidth that this is."""
    by_head = 0 if ngram else k
    config, draft_vocab = SHAPES[shape], HEAD_SHAPES.get(f"{shape}-eagle3", {}).get("draft_vocab_size", 0)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    kv, num_layers = 4 * head_dim * config["num_key_value_heads"], config["num_hidden_layers"]
    num_logits = (1 + k) * config["vocab_size"] + by_head * draft_vocab
    num_bytes = {
        # Of experts only those are read that a token chooses: their number is unknown.
        "products": 0 if "num_experts" in config else step_bytes(shape, by_head),
        "attention": batch * context * kv * (num_layers // config.get("full_attention_interval", 1) + by_head),
        "sampling": 4 * batch * num_logits,  # read once, in float32
    }
    times: dict[str, float] = defaultdict(float)
    for name, us in own_times(ranges):
        times[group_of(name)] += us / NUM_STEPS
    for group, us in sorted(times.items(), key=lambda item: -item[1]):
        line = f"  {group:10} {us:8.1f} us  {us / sum(times.values()):4.0%}"
        if moved := num_bytes.get(group, 0):
            rate = moved / us / 1e6
            line += f"  {moved / 1e6:9.1f} MB  {rate:5.2f} TB/s  {rate / 4.8:4.0%} of 4.8"
        print(line)


def profile_batch(core: Any, options: argparse.Namespace, batch: int, num_layers: int) -> None:
    shape, k, trace = options.shape, options.k, options.trace
    params = SamplingParams(temperature=0.0, seed=0).with_defaults(SamplingParams())
    for i in range(batch):
        core.add(Request(f"{batch}-{i}", tuple(range(100, 228)), params, (), 128 + 800))
    for _ in range(30):
        core.step()
    before, start = core.stats.host_s.total, time.perf_counter()
    for _ in range(60):
        core.step()
    step_us = 1e6 * (time.perf_counter() - start) / 60
    host_us = 1e6 * (core.stats.host_s.total - before) / 60
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(NUM_STEPS):
            core.step()
        torch.cuda.synchronize()
    if trace is not None:
        prof.export_chrome_trace(str(trace / f"{shape}-{batch}.json"))
    ranges = device_ranges(prof)
    busy: dict[str, list[float]] = defaultdict(list)
    for name, begin, end in ranges:
        busy[name].append(end - begin)
    total, span = covered(ranges), ranges[-1][2] - ranges[0][1]
    num_kernels = len(ranges) / NUM_STEPS
    print(f"{shape}, batch {batch}: {step_us:.0f} us a step, host {host_us:.0f} us of it;", end=" ")
    print(f"{num_kernels:.0f} kernels, {num_kernels / num_layers:.1f} a layer;", end=" ")
    print(f"GPU busy {total / NUM_STEPS:.0f} us, gaps {(span - total) / NUM_STEPS:.0f} us a step")
    # Prompts of 128 tokens, and what the steps before the middle of the profile have brought.
    a_step = 1 + sum(FORCED_RATES[:k])
    print_groups(ranges, shape, batch, k, options.ngram, int(128 + 105 * a_step))
    for name, times in sorted(busy.items(), key=lambda item: -sum(item[1]))[:14]:
        a_step, each = sum(times) / NUM_STEPS, sum(times) / len(times)
        print(f"  {a_step:8.1f} us  {len(times) / NUM_STEPS:6.1f} x {each:7.2f} us  {name[:90]}")
    for i in range(batch):
        core.finish(f"{batch}-{i}")
    while core.has_work:
        core.step()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--batch", default="1,8,128")
    parser.add_argument("--k", type=int, default=0, help="tokens drafted by an EAGLE-3 head, accepted at fixed rates")
    parser.add_argument("--ngram", action="store_true", help="draft with n-grams, accepted if they are right")
    parser.add_argument(
        "--rejected",
        action="store_true",
        help="reject every draft, with an adaptive draft length: soon hardly any are proposed",
    )
    parser.add_argument("--trace", type=Path, help="where to leave a Chrome trace of every batch")
    options = parser.parse_args()
    batches = [int(size) for size in options.batch.split(",")]
    speculative = None
    if options.k:
        speculative = (
            {"method": "ngram", "num_speculative_tokens": options.k}
            if options.ngram
            else forced_eagle3(options.shape, options.k)
        )
    elif options.rejected:
        speculative = {**forced_eagle3(options.shape, len(FORCED_RATES), (0.0,) * len(FORCED_RATES)), "adaptive": True}
    engine_options = EngineOptions(
        device="cuda",
        dtype="bfloat16",
        max_num_seqs=max(batches),
        max_model_len=1024,
        speculative_config=speculative,
    )
    engine = build_shape(engine_options, options.shape)
    while options.rejected and engine.core.use_idle_time():  # until all graphs are there
        pass
    for batch in batches:
        profile_batch(engine.core, options, batch, engine.config.model.num_layers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
