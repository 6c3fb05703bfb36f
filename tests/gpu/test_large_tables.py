"""Addresses past 2^31 elements: the same numbers far out in memory as near its beginning."""

from __future__ import annotations

import pytest
import torch

from slipstream.kernels.attention.paged_attention import PagedRequests
from slipstream.kernels.attention.rope_cache import NewTokens, rope_and_cache
from slipstream.kernels.attention.triton_attention import triton_attention
from slipstream.kernels.step.prepare_inputs import prepare_inputs
from slipstream.plan import RowStatus
from tests.bundles import bundle

pytestmark = pytest.mark.gpu
HEADS, KV_HEADS, PAGE, DIM = 32, 8, 16, 128


@pytest.fixture(autouse=True)
def _room() -> None:
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GiB of GPU memory")


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("query_len", [1, 0])
def test_pages_far_out(query_len: int) -> None:
    seq_len, num_pages = 200, 70_000  # 2.3 billion elements
    q = torch.randn(1, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    near = torch.randn(16, 2, KV_HEADS, PAGE, DIM, dtype=torch.bfloat16, device="cuda")
    far = torch.zeros(num_pages, 2, KV_HEADS, PAGE, DIM, dtype=torch.bfloat16, device="cuda")
    assert far.numel() > 2**31
    far[-16:] = near
    pages = torch.arange(13, dtype=torch.int32, device="cuda")[None, :]
    batch = (ints(0, 1), ints(1), ints(seq_len))
    expected = triton_attention(q, near, PagedRequests(*batch, pages), DIM**-0.5, 0, query_len)
    requests = PagedRequests(*batch, pages + num_pages - 16)
    assert torch.equal(triton_attention(q, far, requests, DIM**-0.5, 0, query_len), expected)

    k, v = (torch.randn(1, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    turn = torch.randn(2, 1, 1, DIM, device="cuda").unbind(0)
    page, offset = torch.tensor([num_pages - 1], device="cuda"), torch.tensor([5], device="cuda")
    rope_and_cache(NewTokens(q, k, v, *turn, page, offset), far)
    assert torch.equal(far[-1, 1, :, 5], v[0])


def test_page_tables_far_out() -> None:
    max_pages, position = 1 << 30, 100
    table = torch.zeros(3, max_pages, dtype=torch.int32, device="cuda")
    assert table.numel() > 2**31
    table[2, position // PAGE] = 77
    block_table = torch.empty(1, max_pages, dtype=torch.int32, device="cuda")
    out = {
        "input_ids": ints(-9),
        "positions": torch.zeros(1, dtype=torch.int64, device="cuda"),
        "slot_mapping": torch.zeros(1, dtype=torch.int64, device="cuda"),
        "query_lens": ints(-9),
        "seq_lens": ints(-9),
        "block_table": block_table,
        "logit_indices": torch.zeros(1, dtype=torch.int64, device="cuda"),
        "logit_rows": ints(-9),
        "logit_positions": ints(-9),
        "logit_drafts": ints(-9),
    }
    rows = {
        "num_computed": ints(0, 0, position),
        "num_tokens": ints(0, 0, position + 1),
        "num_drafts": ints(0, 0, 0),
        "status": ints(*[int(RowStatus.RUNNING)] * 3),
        "page_table": table,
    }
    token_ids = torch.arange(3 * 200, dtype=torch.int32, device="cuda").view(3, 200)
    layout = {"batch_rows": ints(2), "query_start_loc": ints(0, 1), "logit_start_loc": ints(0, 1)}
    rest = {"token_ids": token_ids, "page_size": PAGE, "max_logits": 1}
    prepare_inputs(**bundle(prepare_inputs, rows | layout | rest | out))
    assert out["input_ids"].item() == 400 + position
    assert out["slot_mapping"].item() == 77 * PAGE + position % PAGE
    assert block_table[0, position // PAGE].item() == 77

    # A request whose row of the table begins after 2^31 elements.
    cache = torch.randn(78, 2, KV_HEADS, PAGE, DIM, dtype=torch.bfloat16, device="cuda")
    q = torch.randn(3, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    table[2, :7] = torch.arange(70, 77, dtype=torch.int32, device="cuda")
    batch = (ints(0, 1, 2, 3), ints(0, 0, 1), ints(0, 0, position))
    small = table[:, :8].contiguous()
    expected = triton_attention(q, cache, PagedRequests(*batch, small), DIM**-0.5, 0, 1)
    assert torch.equal(triton_attention(q, cache, PagedRequests(*batch, table), DIM**-0.5, 0, 1), expected)
    assert expected[2].any()
