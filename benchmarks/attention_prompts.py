"""Attention over prompts, kernel beside kernel: ``attention.py --prompts`` calls this.

One layer of Llama-3.1-8B's heads (or ``--head-dim``), bfloat16, causal. Each case is a batch of equal prompts, or of
chunks after so many cached tokens. TFLOP/s count the pairs that are attended to, two products each. Kernels:
``pointers`` and ``tma`` (pages of ``--page-size``), ``flashinfer`` (its native kernel, planned with exact lengths).
With ``--tiles`` every tile that is tried for ``tma`` has a row, with ``--specialized`` also with warps that only load.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.attention.backend import AttentionLayer
from slipstream.attention.backends.flashinfer import FlashInferBackend
from slipstream.attention.backends.flashinfer_library import FlashInferLibrary
from slipstream.attention.backends.flashinfer_paths import Features, HeadShape, choose_paths, is_installed
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.kernels.attention.latent_tiles import room_of
from slipstream.kernels.attention.tma_attention import can_use_tma, launch_tma, prompt_tiles
from slipstream.kernels.attention.triton_attention import triton_attention

MAX_ERROR = 2e-2  # of bfloat16, relative to the largest result


class PromptCase(NamedTuple):
    batch: int
    num_tokens: int  # of each chunk
    num_cached: int  # before it

    @property
    def num_pairs(self) -> int:
        return self.batch * (self.num_tokens * self.num_cached + self.num_tokens * (self.num_tokens + 1) // 2)


def parse_cases(text: str) -> list[PromptCase]:
    """Such as 1x8192, 8x2048, 1x2048+30720: batch, tokens, and cached tokens before them."""
    found = []
    for part in text.split(","):
        sizes, _, cached = part.partition("+")
        batch, _, length = sizes.partition("x")
        found.append(PromptCase(int(batch), int(length), int(cached or 0)))
    return found


def make_batch(case: PromptCase, page_size: int) -> CommonAttentionMetadata:
    total = case.num_tokens + case.num_cached
    num_pages = -(-total // page_size)
    starts = np.arange(case.batch + 1, dtype=np.int32) * case.num_tokens
    full = torch.ones(case.batch, dtype=torch.int32, device="cuda")
    return CommonAttentionMetadata(
        num_reqs=case.batch,
        num_actual_tokens=int(starts[-1]),
        max_query_len=case.num_tokens,
        query_start_loc=torch.from_numpy(starts).cuda(),
        query_start_loc_cpu=starts,
        query_lens=full * case.num_tokens,
        seq_lens=full * total,
        seq_lens_cpu_upper_bound=np.full(case.batch, total, dtype=np.int32),
        block_table=(1 + torch.randperm(case.batch * num_pages, device="cuda").int()).view(case.batch, num_pages),
        slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64, device="cuda"),
        num_computed_cpu=np.full(case.batch, case.num_cached, dtype=np.int32),
    )


def kernels(
    layer: AttentionLayer, q: Tensor, cache: Tensor, common: CommonAttentionMetadata, arguments: argparse.Namespace
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    requests, page_size = common.requests, cache.shape[3]
    yield "pointers", lambda: triton_attention(q, cache, requests, layer.scale, 0, 0)
    if can_use_tma(q, cache, requests):
        tiles = prompt_tiles(layer.head_dim, page_size, room_of(q).shared)
        if not arguments.tiles:
            tiles = tiles[:1]
        if arguments.specialized:
            tiles += [tile._replace(specializes=True) for tile in tiles]
        for tile in tiles:

            def run(tile: Any = tile) -> Tensor:
                out = torch.empty_like(q)
                launch_tma(q, cache, requests, layer.scale, 0, out, tile)
                return out

            specialized = ", specialized" if tile.specializes else ""
            yield f"tma {tile.rows} rows, {tile.num_warps} warps, {tile.num_stages} stages{specialized}", run
    if is_installed():
        shape = HeadShape(layer.num_heads, layer.num_kv_heads, layer.head_dim, page_size, "bfloat16")
        paths = choose_paths(torch.cuda.get_device_capability(), shape, Features(query_len=1), True).check()
        device = torch.device("cuda")
        library = FlashInferLibrary(paths, device)
        backend = FlashInferBackend(paths, library, page_size, common.num_reqs, {1}, device)
        metadata = backend.build(common)
        yield "flashinfer", lambda: backend.run(layer, q, cache, metadata)


def measure_prompts(
    arguments: argparse.Namespace, layer: AttentionLayer, microseconds: Callable[[Callable[[], Tensor], bool], float]
) -> list[dict[str, Any]]:
    """A row for each case, page size and kernel; results are compared with those of the first."""
    rows = []
    layer = replace(layer, head_dim=arguments.head_dim, scale=arguments.head_dim**-0.5)
    for case in parse_cases(arguments.prompts):
        for page_size in map(int, arguments.page_size.split(",")):
            torch.manual_seed(0)
            common = make_batch(case, page_size)
            shape = (int(common.block_table.numel()) + 2, 2, layer.num_kv_heads, page_size, layer.head_dim)
            cache = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
            q = torch.randn(case.batch * case.num_tokens, layer.num_heads, layer.head_dim).bfloat16().cuda()
            expected = None
            for name, run in kernels(layer, q, cache, common, arguments):
                out = run().float()
                expected = out if expected is None else expected
                error = float((out - expected).abs().max() / expected.abs().max())
                if not error < MAX_ERROR:
                    raise SystemExit(f"{name} differs from the first kernel by {error:.3f} at {case}")
                us = microseconds(run, False)
                tflops = 4 * case.num_pairs * layer.num_heads * layer.head_dim / us / 1e6
                about = {"case": name, **case._asdict(), "page_size": page_size, "head_dim": layer.head_dim}
                rows.append({**about, "us": round(us, 1), "tflops": round(tflops, 1), "tok_s": None})
                print(f"{case}, pages of {page_size}, {name}: {tflops:.0f} TFLOP/s", file=sys.stderr, flush=True)
    return rows
