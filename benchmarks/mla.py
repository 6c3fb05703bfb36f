"""Decode attention over latents beside FlashInfer's wrapper: one layer, bfloat16, DeepSeek's sizes (512 and 64).

Every request has the same context and the same number of new tokens (1, or 4 as with three drafts). The time is that of
attention alone, from absorbed queries to latent results, recorded in a graph, median of many after a warm-up. Ours
includes the table of parts, which a step makes once for all layers, in a column of its own; FlashInfer's plan, which
runs on the host in every step and needs exact lengths there, is not counted. Results are compared. The share is of the
time that reading the latents once takes, by the bandwidth of a large copy on the same card. With 128 heads on one card
the work is bound by arithmetic, so that share is low there for every kernel.

    python benchmarks/mla.py [--heads 16,128] [--batch 1,8,64] [--context 1024,8192,32768] [--query-len 1,4]
    python benchmarks/mla.py --device cpu      # tries it out: small sizes, no figures that mean anything
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from decode_throughput import copy_bandwidth
from slipstream.attention.mla import MAX_ABSORBED
from slipstream.commands.results import collect_results, prepare_folder, write_results
from slipstream.kernels.attention.latent_decode import LatentQueries, latent_decode
from slipstream.kernels.attention.latent_parts import PartTable, count_parts, schedule_parts
from slipstream.kernels.attention.paged_attention import PagedRequests

LATENT, ROPE, PAGE_SIZE = 512, 64, 16
SCALE = 192**-0.5
NUM_LAUNCHES, NUM_ROUNDS = 10, 20
MAX_ERROR = 2e-2  # of bfloat16, relative to the largest result


class Shape(NamedTuple):
    heads: int
    batch: int
    context: int
    query_len: int


class Step(NamedTuple):
    """All tokens in use; pages in an order of their own."""

    q: LatentQueries
    cache: Tensor
    requests: PagedRequests
    table: PartTable
    max_parts: int


def draw(shape: Shape, device: str, dtype: torch.dtype) -> Step:
    heads, batch, context, query_len = shape
    num_pages = -(-context // PAGE_SIZE)
    block_table = (1 + torch.randperm(batch * num_pages, device=device).int()).view(batch, num_pages)
    full = torch.ones(batch, dtype=torch.int32, device=device)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * query_len
    requests = PagedRequests(starts, full * query_len, full * context, block_table)
    cache = torch.randn(batch * num_pages + 2, PAGE_SIZE, LATENT + ROPE, device=device).to(dtype)
    q = torch.randn(batch * query_len, heads, LATENT + ROPE, device=device).to(dtype)
    queries = LatentQueries(q[..., :LATENT].contiguous(), q[..., LATENT:].contiguous())
    num_programs = 4 if device == "cpu" else torch.cuda.get_device_properties(0).multi_processor_count
    ints = {"dtype": torch.int32, "device": device}
    table = PartTable(torch.empty(batch + 1, **ints), torch.empty(num_programs + 1, 2, **ints))
    schedule_parts(requests, MAX_ABSORBED, table)
    return Step(queries, cache, requests, table, batch * count_parts(context))


def ours(shape: Shape, step: Step) -> Callable[[], Tensor]:
    limits = (shape.query_len, step.max_parts, SCALE)
    return lambda: latent_decode(step.q, step.cache, step.requests, step.table, *limits)


def flashinfer(shape: Shape, step: Step) -> Callable[[], Tensor]:
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    wrapper = BatchMLAPagedAttentionWrapper(workspace, backend="auto")
    num_pages = step.requests.block_table.shape[1]
    lens = step.requests.seq_lens
    indptr = torch.arange(shape.batch + 1, dtype=torch.int32, device="cuda") * num_pages
    pages = step.requests.block_table.flatten()
    kind = step.cache.dtype
    sizes = (shape.heads, LATENT, ROPE, PAGE_SIZE, True, SCALE, kind, kind)
    wrapper.plan(step.requests.query_start_loc, indptr, pages, lens, *sizes)
    latents, rope = step.cache[..., :LATENT], step.cache[..., LATENT:]
    return lambda: wrapper.run(step.q.latent, step.q.rope, latents, rope)


def microseconds(run: Callable[[], Any], device: str) -> float:
    """Of one launch among others of its kind, in a graph."""
    if device == "cpu":
        begin = time.perf_counter()
        run()
        return 1e6 * (time.perf_counter() - begin)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(NUM_LAUNCHES):
                run()
        times = []
        for _ in range(NUM_ROUNDS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(1000 * begin.elapsed_time(end) / NUM_LAUNCHES)
    return statistics.median(times)


def measure(shape: Shape, device: str, bandwidth: float, has_peer: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    step = draw(shape, device, torch.float32 if device == "cpu" else torch.bfloat16)
    run = ours(shape, step)
    own = microseconds(run, device)
    table = microseconds(lambda: schedule_parts(step.requests, MAX_ABSORBED, step.table), device)
    least = 1e6 * shape.batch * shape.context * (LATENT + ROPE) * step.cache.element_size() / bandwidth
    row: dict[str, Any] = {
        "case": "mla-decode",
        "batch": shape.batch,
        "context": shape.context,
        "q": shape.query_len,
        "heads": shape.heads,
        "us": round(own, 2),
        "table_us": round(table, 2),
        "share_of_bandwidth": round(least / own, 3),
        "flashinfer_us": None,
        "ratio": None,
    }
    if has_peer:
        peer = flashinfer(shape, step)
        found, expected = run().float(), peer().float()
        error = float((found - expected).abs().max() / expected.abs().max())
        if not error < MAX_ERROR:
            raise SystemExit(f"results differ by {error:.3f} at {shape}")
        us = microseconds(peer, device)
        row |= {"flashinfer_us": round(us, 2), "ratio": round(us / own, 3)}
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--heads", default="16,128")
    parser.add_argument("--batch", default="1,8,64")
    parser.add_argument("--context", default="1024,8192,32768")
    parser.add_argument("--query-len", default="1,4")
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    prepare_folder(arguments.output_dir)
    on_gpu = arguments.device == "cuda"
    given = (arguments.heads, arguments.batch, arguments.context, arguments.query_len)
    heads, batches, contexts, lens = [[int(n) for n in text.split(",")] for text in given]
    if not on_gpu:
        heads, batches, contexts, lens = [3], [1, 2], [100, 1100], [1, 2]
    has_peer = on_gpu and importlib.util.find_spec("flashinfer") is not None
    bandwidth, rows = copy_bandwidth() if on_gpu else 1e10, []
    for n in heads:
        for query_len in lens:
            for batch in batches:
                for context in contexts:
                    shape = Shape(n, batch, context, query_len)
                    rows.append(measure(shape, arguments.device, bandwidth, has_peer))
                    print(f"{shape}: {rows[-1]['us']} us", file=sys.stderr, flush=True)
    results = collect_results(rows, device=arguments.device)
    title = f"latent attention of one layer, {results.hardware}, {bandwidth / 1e12:.2f} TB/s"
    table = Table(
        "heads", "q", "batch", "context", "us", "table", "FlashInfer", "ratio", "of the bandwidth", title=title
    )
    for row in rows:
        names = ("heads", "q", "batch", "context", "us", "table_us", "flashinfer_us", "ratio", "share_of_bandwidth")
        table.add_row(*("" if row[name] is None else str(row[name]) for name in names))
    path = write_results(results, arguments.output_dir, "mla-decode")
    Console(width=120).print(table)
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
