"""Decode attention of the backends beside each other: one layer of Llama-3.1-8B's heads, bfloat16, pages of 16.

Every request has the same context and the same number of new tokens (1, or 4 as with three drafts). The time is that of
attention alone, recorded in a graph where the backend can be and launched where not, median of many after a warm-up;
keys are in the cache already. Only `triton` does more, for that is how the engine asks it: it takes queries and keys as
the projection left them, rotates and stores them on the way. `triton-mixed` is its kernel for mixed batches, over keys
in the cache as the others. Results are compared. The share is of the time that reading all keys and values once takes.
With `--common` all requests begin with so many of the same tokens, and `cascade` reads those once.

    python benchmarks/attention.py [--backends triton,triton-mixed,flashinfer,flex] [--batch 1,8] [--context 512,4096]
    python benchmarks/attention.py --backends triton,cascade --batch 16,64 --context 2304,8448 --common 2048
    python benchmarks/attention.py --prompts 1x8192,1x32768,8x2048,1x2048+30720 --page-size 16,64,128 --tiles
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from attention_prompts import measure_prompts
from slipstream.attention.backend import AttentionBackend, AttentionLayer
from slipstream.attention.backends.flashinfer import FlashInferBackend
from slipstream.attention.backends.flashinfer_library import FlashInferLibrary
from slipstream.attention.backends.flashinfer_paths import Features, HeadShape, choose_paths, is_installed
from slipstream.attention.backends.flex import FlexBackend
from slipstream.attention.backends.triton import TritonBackend
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.commands.results import collect_results, prepare_folder, write_results
from slipstream.kernels.attention.rope_cache import NewTokens

LAYER = AttentionLayer(idx=0, num_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5)
PAGE_SIZE, BANDWIDTH = 16, 4.8e12
NUM_LAUNCHES, NUM_ROUNDS = 10, 20
MAX_ERROR = 2e-2  # of bfloat16, relative to the largest result


def make(name: str, query_len: int, batch: int) -> AttentionBackend:
    if name in ("triton", "triton-mixed", "cascade"):
        return TritonBackend()
    if name == "flex":
        return FlexBackend(PAGE_SIZE)
    shape = HeadShape(LAYER.num_heads, LAYER.num_kv_heads, LAYER.head_dim, PAGE_SIZE, "bfloat16")
    features = Features(query_len=query_len)
    paths = choose_paths(torch.cuda.get_device_capability(), shape, features, is_installed()).check()
    device = torch.device("cuda")
    return FlashInferBackend(paths, FlashInferLibrary(paths, device), PAGE_SIZE, batch, {query_len}, device)


def step(batch: int, context: int, query_len: int, num_common: int) -> CommonAttentionMetadata:
    """All tokens alive, pages in an order of their own but for the common ones."""
    num_pages = -(-context // PAGE_SIZE)
    table = (1 + torch.randperm(batch * num_pages, device="cuda").int()).view(batch, num_pages)
    table[:, : num_common // PAGE_SIZE] = table[0, : num_common // PAGE_SIZE]
    starts = np.arange(batch + 1, dtype=np.int32) * query_len
    full = torch.full((batch,), 1, dtype=torch.int32, device="cuda")
    return CommonAttentionMetadata(
        num_reqs=batch,
        num_actual_tokens=batch * query_len,
        max_query_len=query_len,
        query_start_loc=torch.from_numpy(starts).cuda(),
        query_start_loc_cpu=starts,
        query_lens=full * query_len,
        seq_lens=full * context,
        seq_lens_cpu_upper_bound=np.full(batch, context, dtype=np.int32),
        block_table=table,
        slot_mapping=torch.zeros(batch * query_len, dtype=torch.int64, device="cuda"),
        num_computed_cpu=np.full(batch, context - query_len, dtype=np.int32),
        num_common_pages=num_common // PAGE_SIZE,
    )


def runner(
    name: str, backend: AttentionBackend, q: Tensor, kv_cache: Tensor, common: CommonAttentionMetadata
) -> Callable[[], Tensor]:
    num_common = common.num_common_pages if name == "cascade" else 0
    metadata = backend.build(replace(common, num_common_pages=num_common))
    if name != "triton":
        return lambda: backend.run(LAYER, q, kv_cache, metadata)
    assert isinstance(backend, TritonBackend)
    # The new keys and values are those that the cache has, so that the result is the same; nothing is turned.
    query_len = common.max_query_len
    positions = (common.seq_lens[:, None] - query_len + torch.arange(query_len, device="cuda")).long()
    pages = common.block_table.gather(1, positions // PAGE_SIZE).flatten().long()
    offsets = (positions % PAGE_SIZE).flatten()
    k, v = kv_cache[pages, :, :, offsets].unbind(1)
    cos = torch.ones(q.shape[0], 1, LAYER.head_dim, dtype=q.dtype, device="cuda")
    new = NewTokens(q, k.contiguous(), v.contiguous(), cos, torch.zeros_like(cos), pages, offsets, None)

    def run() -> Tensor:
        out = backend.run_new(LAYER, new, kv_cache, metadata)
        assert out is not None
        return out

    return run


def microseconds(run: Callable[[], Tensor], in_graph: bool) -> float:
    """Of one launch among others of its kind."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
        stream.synchronize()
        launch: Callable[[], Any] = lambda: [run() for _ in range(NUM_LAUNCHES)]  # noqa: E731
        if in_graph:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                launch()
            launch = graph.replay
        times = []
        for _ in range(NUM_ROUNDS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            launch()
            end.record(stream)
            end.synchronize()
            times.append(1000 * begin.elapsed_time(end) / NUM_LAUNCHES)
    return statistics.median(times)


def measure(names: list[str], batch: int, context: int, query_len: int, num_common: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    common = step(batch, context, query_len, num_common)
    pages = int(common.block_table.numel()) + 2
    shape = (pages, 2, LAYER.num_kv_heads, PAGE_SIZE, LAYER.head_dim)
    kv_cache = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    q = torch.randn(batch * query_len, LAYER.num_heads, LAYER.head_dim, dtype=torch.bfloat16, device="cuda")
    least = 1e6 * 4 * batch * context * LAYER.num_kv_heads * LAYER.head_dim / BANDWIDTH
    rows, expected = [], None
    for name in names:
        backend = make(name, query_len, batch)
        run = runner(name, backend, q, kv_cache, common)
        out = run().float()
        expected = out if expected is None else expected
        error = float((out - expected).abs().max() / expected.abs().max())
        if not error < MAX_ERROR:
            raise SystemExit(f"{name} differs from {names[0]} by {error:.3f} at {batch} x {context}, q = {query_len}")
        in_graph = backend.caps.graph_support != "never"
        us = microseconds(run, in_graph)
        rows.append(
            {
                "case": name,
                "batch": batch,
                "context": context,
                "query_len": query_len,
                "common": num_common,
                "us": round(us, 2),
                "of_bandwidth": round(least / us, 3),
                "in_graph": in_graph,
            }
        )
    return rows


def show_prompts(arguments: argparse.Namespace) -> int:
    results = collect_results(measure_prompts(arguments, LAYER, microseconds), device="cuda")
    table = Table("kernel", title=f"attention of one layer over prompts, {results.hardware}")
    shown = ("batch", "num_tokens", "num_cached", "page_size", "head_dim", "us", "tflops")
    for name in shown:
        table.add_column(name.replace("_", " "), justify="right")
    for row in results.rows:
        table.add_row(row["case"], *(str(row[name]) for name in shown))
    path = write_results(results, arguments.output_dir, "attention-prompts")
    Console(width=120).print(table)
    print(f"written to {path}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="triton,triton-mixed,flashinfer")
    parser.add_argument("--batch", default="1,8,64")
    parser.add_argument("--context", default="512,4096,32768")
    parser.add_argument("--query-len", default="1,4")
    parser.add_argument("--common", type=int, default=0, help="tokens that all requests begin with")
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--prompts", help="attention over prompts instead: see attention_prompts.py")
    parser.add_argument("--page-size", default="16,64,128", help="for --prompts")
    parser.add_argument("--head-dim", type=int, default=128, help="for --prompts")
    parser.add_argument("--tiles", action="store_true", help="for --prompts: every tile that a tuner tries")
    parser.add_argument("--specialized", action="store_true", help="for --prompts: with warps that only load, too")
    arguments = parser.parse_args()
    prepare_folder(arguments.output_dir)
    if arguments.prompts:
        return show_prompts(arguments)
    names = arguments.backends.split(",")
    sizes = [[int(n) for n in text.split(",")] for text in (arguments.batch, arguments.context, arguments.query_len)]
    rows = []
    for query_len in sizes[2]:
        for batch in sizes[0]:
            for context in sizes[1]:
                rows += measure(names, batch, context, query_len, arguments.common)
                print(f"batch {batch}, context {context}, q = {query_len}", file=sys.stderr, flush=True)
    results = collect_results(rows, device="cuda")
    table = Table("backend", title=f"attention of one layer, {results.hardware}")
    for name in ("q", "batch", "context", "us", f"of {names[0]}'s speed", "of the bandwidth", "in a graph"):
        table.add_column(name, justify="right")
    first = {(r["query_len"], r["batch"], r["context"]): r["us"] for r in rows if r["case"] == names[0]}
    for r in rows:
        key = (r["query_len"], r["batch"], r["context"])
        figures = (f"{r['us']:.1f}", f"{first[key] / r['us']:.2f}", f"{r['of_bandwidth']:.2f}")
        table.add_row(r["case"], *map(str, key), *figures, "yes" if r["in_graph"] else "no")
    path = write_results(results, arguments.output_dir, "attention")
    Console(width=120).print(table)
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
