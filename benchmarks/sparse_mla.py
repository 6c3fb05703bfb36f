"""Attention to chosen latents beside attention to all of them: one layer, bfloat16, DeepSeek-V3.2's sizes.

Every request has the same context and one new token. Dense is ``latent_decode`` over all keys; sparse is scoring every
key by the indexer's heads, choosing 2,048 positions, and attending to those. Times are of launches in a graph, medians
of many after a warm-up. The share of scoring is of the time that reading the indexer's keys once takes, by the
bandwidth of a large copy on the same card. ``torch.topk`` over the same scores is beside the choice of positions; its
order of equal scores is not fixed, so results are compared by their scores.

    python benchmarks/sparse_mla.py [--heads 128] [--batch 1,8] [--context 8192,32768,131072]
    python benchmarks/sparse_mla.py --device cpu      # tries it out: small sizes, no figures that mean anything
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from decode_throughput import copy_bandwidth
from mla import SCALE, Shape, Step, draw, microseconds, ours
from slipstream.attention.sparse_mla import PART_SIZE
from slipstream.commands.results import collect_results, prepare_folder, write_results
from slipstream.kernels.attention.index_scores import IndexQueries, index_scores
from slipstream.kernels.attention.index_topk import ChosenKeys, choose_positions, top_positions
from slipstream.kernels.attention.sparse_latent import sparse_latent_attention
from slipstream.kernels.attention.token_keys import TokenKeys, find_token_keys

INDEX_HEADS, INDEX_DIM, TOP_K = 64, 128, 2048


class Indexed(NamedTuple):
    """The indexer's side of a step."""

    queries: IndexQueries
    pages: Tensor
    token_keys: TokenKeys
    top_k: int


def draw_index(shape: Shape, step: Step, device: str) -> Indexed:
    num_tokens, kind = shape.batch * shape.query_len, step.cache.dtype
    heads, dim, top_k = (INDEX_HEADS, INDEX_DIM, TOP_K) if device == "cuda" else (3, 16, 64)
    q = torch.randn(num_tokens, heads, dim, device=device).to(kind)
    weights = torch.randn(num_tokens, heads, device=device) * heads**-0.5
    pages = torch.randn(*step.cache.shape[:2], dim, device=device).to(kind)
    return Indexed(IndexQueries(q, weights), pages, TokenKeys(*find_token_keys(step.requests, num_tokens)), top_k)


def measure(shape: Shape, device: str, bandwidth: float) -> dict[str, Any]:
    torch.manual_seed(0)
    step = draw(shape, device, torch.float32 if device == "cpu" else torch.bfloat16)
    index, table, context = draw_index(shape, step, device), step.requests.block_table, shape.context
    scale, top_k = index.queries.q.shape[2] ** -0.5, index.top_k
    given = (index.queries, index.pages, table, index.token_keys, context, scale)
    scores = index_scores(*given)
    chosen = ChosenKeys(*choose_positions(*given, top_k))
    best = scores.topk(min(top_k, context), dim=1).values.sort(dim=1).values
    found = scores.gather(1, chosen.positions[:, : best.shape[1]].long()).sort(dim=1).values
    if not torch.equal(found, best):
        raise SystemExit(f"other scores than torch.topk's at {shape}")

    def attend() -> Tensor:
        return sparse_latent_attention(step.q, step.cache, table, index.token_keys, chosen, PART_SIZE, SCALE)

    def all_of_it() -> Tensor:
        own = ChosenKeys(*choose_positions(*given, top_k))
        return sparse_latent_attention(step.q, step.cache, table, index.token_keys, own, PART_SIZE, SCALE)

    times = {
        "dense_us": microseconds(ours(shape, step), device),
        "sparse_us": microseconds(all_of_it, device),
        "scores_us": microseconds(lambda: index_scores(*given), device),
        "top_us": microseconds(lambda: top_positions(scores, top_k), device),
        "torch_topk_us": microseconds(lambda: scores.topk(min(top_k, context), dim=1), device),
        "attend_us": microseconds(attend, device),
    }
    least = 1e6 * shape.batch * context * index.pages.shape[2] * index.pages.element_size() / bandwidth
    return {
        "case": "sparse-mla",
        "batch": shape.batch,
        "context": context,
        "heads": shape.heads,
        "ratio": round(times["dense_us"] / times["sparse_us"], 3),
        "share_of_bandwidth": round(least / times["scores_us"], 3),
        **{name: round(value, 2) for name, value in times.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--heads", default="128")
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--context", default="8192,32768,131072")
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    prepare_folder(arguments.output_dir)
    on_gpu = arguments.device == "cuda"
    given = (arguments.heads, arguments.batch, arguments.context)
    heads, batches, contexts = [[int(n) for n in text.split(",")] for text in given]
    if not on_gpu:
        heads, batches, contexts = [3], [1, 2], [40, 300]
    bandwidth, rows = copy_bandwidth() if on_gpu else 1e10, []
    for n in heads:
        for batch in batches:
            for context in contexts:
                rows.append(measure(Shape(n, batch, context, 1), arguments.device, bandwidth))
                print(f"{n} heads, batch {batch}, context {context}: {rows[-1]['ratio']}", file=sys.stderr, flush=True)
    results = collect_results(rows, device=arguments.device)
    names = ("heads", "batch", "context", "dense_us", "sparse_us", "ratio")
    names += ("scores_us", "share_of_bandwidth", "top_us", "torch_topk_us", "attend_us")
    table = Table(*names, title=f"chosen latents against all, one layer, {results.hardware}")
    for row in rows:
        table.add_row(*(str(row[name]) for name in names))
    path = write_results(results, arguments.output_dir, "sparse-mla")
    Console(width=140).print(table)
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
