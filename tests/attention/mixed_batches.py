"""Random steps of a size that GPU kernels take: decodes with drafts, some not made, then chunks of prompts."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from slipstream.attention.metadata import CommonAttentionMetadata

PAGE, MAX_PAGES, HEADS, KV_HEADS, DIM = 16, 24, 8, 2, 64


def draw_batch(seed: int, num_reqs: int, query_len: int, page: int = PAGE) -> CommonAttentionMetadata:
    """Sequences that end at, before and after page borders; padded requests and tokens in some."""
    rng = random.Random(seed)
    limit = page * MAX_PAGES
    num_decodes = rng.choice([0, num_reqs, rng.randint(0, num_reqs)])
    rows = []
    for i in range(num_reqs):
        before = rng.choice([page - 1, page, 3 * page + 1, rng.randint(1, limit - 8)])
        if i < num_decodes:
            rows.append((min(before, limit - query_len), query_len, rng.randint(1, query_len)))
        else:
            before = rng.choice([0, before])
            count = rng.randint(1, min(90, limit - before))
            rows.append((before, count, count))
    computed, planned, alive = (np.array(column, dtype=np.int32) for column in zip(*rows, strict=True))
    starts = np.concatenate([[0], np.cumsum(planned)]).astype(np.int32)
    table = 1 + torch.tensor(rng.sample(range(num_reqs * MAX_PAGES), num_reqs * MAX_PAGES), dtype=torch.int32)
    return CommonAttentionMetadata(
        *(num_reqs, int(starts[-1]), int(planned.max()), torch.from_numpy(starts), starts),
        *(torch.from_numpy(alive), torch.from_numpy(computed + alive), computed + planned),
        *(table.view(num_reqs, MAX_PAGES), torch.zeros(int(starts[-1]), dtype=torch.int64)),
        num_computed_cpu=computed,
        num_decodes=num_decodes,
    )


def draw_values(common: CommonAttentionMetadata, page: int = PAGE) -> tuple[Tensor, Tensor]:
    """Queries and a cache. What no request of the step has written is no number."""
    q = torch.randn(common.num_actual_tokens, HEADS, DIM).bfloat16()
    cache = torch.full((common.block_table.numel() + 2, 2, KV_HEADS, page, DIM), torch.nan).bfloat16()
    cache[0] = 0.0
    for pages, seq_len in zip(common.block_table.long(), common.seq_lens.tolist(), strict=True):
        slots = torch.arange(seq_len)
        cache[pages[slots // page], :, :, slots % page] = torch.randn(seq_len, 2, KV_HEADS, DIM).bfloat16()
    return q, cache


def on(common: CommonAttentionMetadata, device: torch.device) -> CommonAttentionMetadata:
    names = ("query_start_loc", "query_lens", "seq_lens", "block_table", "slot_mapping")
    return replace(common, **{name: getattr(common, name).to(device) for name in names})
