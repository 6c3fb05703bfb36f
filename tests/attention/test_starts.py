"""A step whose requests have keys from some slot on only, through every backend."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from slipstream.attention.backend import AttentionBackend, AttentionLayer
from slipstream.attention.backends.cpu import CpuBackend
from slipstream.attention.backends.reference import ReferenceBackend
from slipstream.attention.backends.triton import TritonBackend
from slipstream.attention.grouped_query import NewHeads
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.kernels import native
from tests.contexts import context_of
from tests.kernels.attention.dense_attention import dense_attention, plant_nan

PAGE, HEADS, KV_HEADS, DIM, MAX_PAGES = 4, 4, 2, 32, 12
SEQ_LENS, STARTS = (9, 40, 33, 24), (0, 30, 32, 8)
BACKENDS = {
    "reference": ReferenceBackend,
    "cpu": lambda: CpuBackend(PAGE),
    "cpu-in-place": lambda: CpuBackend(PAGE, in_place=True, head_dim=DIM),
    "triton": TritonBackend,
}


def step(query_lens: tuple[int, ...]) -> tuple[CommonAttentionMetadata, torch.Tensor]:
    """The metadata of a step, and the position of each token."""
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    positions = torch.cat([torch.arange(s - n, s) for s, n in zip(SEQ_LENS, query_lens, strict=True)])
    owner = torch.repeat_interleave(torch.arange(len(SEQ_LENS)), torch.tensor(query_lens))
    table = 1 + torch.randperm(len(SEQ_LENS) * MAX_PAGES).view(len(SEQ_LENS), MAX_PAGES).int()
    common = CommonAttentionMetadata(
        num_reqs=len(SEQ_LENS),
        num_actual_tokens=len(positions),
        max_query_len=max(query_lens),
        query_start_loc=torch.from_numpy(starts),
        query_start_loc_cpu=starts,
        query_lens=torch.tensor(query_lens, dtype=torch.int32),
        seq_lens=torch.tensor(SEQ_LENS, dtype=torch.int32),
        seq_lens_cpu_upper_bound=np.array(SEQ_LENS, dtype=np.int32) + 2,
        block_table=table,
        slot_mapping=table[owner, positions // PAGE].long() * PAGE + positions % PAGE,
        seq_starts=torch.tensor(STARTS, dtype=torch.int32),
    )
    return common, positions


@pytest.mark.parametrize("query_lens", [(1, 1, 1, 1), (3, 3, 3, 3), (9, 12, 1, 20)], ids=["decode", "verify", "mixed"])
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("make", BACKENDS.values(), ids=BACKENDS)
def test_what_lies_before_the_first_slot_is_not_there(
    make: Callable[[], AttentionBackend], window: int, query_lens: tuple[int, ...]
) -> None:
    if make is BACKENDS["cpu-in-place"] and native.library() is None:
        pytest.skip("no C kernels here")
    torch.manual_seed(0)
    backend, (common, positions) = make(), step(query_lens)
    metadata = backend.build(common)
    cache = torch.randn(len(SEQ_LENS) * MAX_PAGES + 2, 2, KV_HEADS, PAGE, DIM)
    cache[0] = 0.0
    assert common.seq_starts is not None
    plant_nan(cache, common.block_table, common.seq_starts)
    q, k, v = (torch.randn(len(positions), heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    no_turn = torch.zeros(64, 2, DIM // 2)
    no_turn[:, 0] = 1.0
    context = context_of(backend, metadata, [cache], positions, common.slot_mapping)
    out = context.run(AttentionLayer(0, HEADS, KV_HEADS, DIM, 0.3, window), NewHeads(q, k, v, no_turn))
    tables = (common.query_start_loc, common.query_lens, common.seq_lens, common.block_table)
    expected = dense_attention(q, cache, *tables, 0.3, window, common.seq_starts)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
