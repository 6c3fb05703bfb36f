"""Batches for the kernel that pools: every kind, first, middle and last chunks, rows at rest, odd sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from slipstream.kernels.step.pool import pool
from slipstream.pooling import PoolingKind
from tests.kernels.triton_check import Case, Real, poisoned

# Of each request: its tokens here, the position of the first, and the length of its prompt.
_SHARES = [(1, 0, 1), (3, 0, 9), (40, 5, 45), (17, 17, 34), (1, 8, 9), (0, 4, 9), (2, 30, 40), (16, 0, 16)]


def pools() -> Iterator[Case]:
    for size in (1, 7, 48, 300):

        def args(size: int = size) -> dict[str, Any]:
            shares = [share for share in _SHARES for _ in range(1 + len(PoolingKind))]
            num_reqs = len(shares)
            kinds = [0, *PoolingKind] * len(_SHARES)
            planned = [max(1, count) for count, *_ in shares]
            starts = torch.tensor([0, *planned]).cumsum(0).to(torch.int32)
            positions = torch.cat([torch.arange(max(1, n)) + first for n, first, _ in shares])
            rows = torch.randperm(num_reqs + 2)[:num_reqs].to(torch.int32)
            columns = torch.zeros(2, num_reqs + 2, dtype=torch.int32)
            columns[0, rows], columns[1, rows] = torch.tensor([kinds, [share[2] for share in shares]]).to(torch.int32)
            # A row that begins must not read what an earlier request has left.
            kept = torch.randn(num_reqs + 2, size)
            begins = [row for row, (_, first, _) in zip(rows.tolist(), shares, strict=True) if first == 0]
            kept[begins] = torch.nan
            return {
                "hidden": Real(torch.randn(int(starts[-1]) + 3, size)),
                "positions": positions,
                "batch_rows": rows,
                "starts": starts,
                "query_lens": torch.tensor([share[0] for share in shares], dtype=torch.int32),
                "kinds": columns[0],
                "prompt_len": columns[1],
                "kept": kept,
                "out": poisoned(num_reqs, size, dtype=torch.float32),
            }

        yield Case(f"pool-{size}", pool, args, scale=4.0)
