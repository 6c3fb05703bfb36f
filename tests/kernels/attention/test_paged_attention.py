from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.kernels.attention.paged_attention import PagedRequests, paged_attention
from tests.kernels.attention.dense_attention import dense_attention, hide_queries, plant_nan

PAGE = 4


def expected_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int) -> torch.Tensor:
    """torch's own attention on contiguous keys and values, heads repeated instead of grouped."""
    num_query, num_heads, _ = q.shape
    seq_len, num_kv_heads, _ = k.shape
    repeat = num_heads // num_kv_heads
    k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    distance = torch.arange(seq_len - num_query, seq_len).unsqueeze(1) - torch.arange(seq_len)
    mask = (distance >= 0) & ((distance < window) if window else True)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=mask, scale=scale
    )
    return out.transpose(0, 1)


@settings(max_examples=40, deadline=None)
@given(
    lens=st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 21)),  # (query tokens, tokens before them)
        min_size=1,
        max_size=6,
    ),
    heads=st.sampled_from([(1, 1), (4, 2), (9, 3)]),
    window=st.sampled_from([0, 1, 5, 64]),
    seed=st.integers(0, 1000),
)
def test_equals_contiguous_attention(
    lens: list[tuple[int, int]], heads: tuple[int, int], window: int, seed: int
) -> None:
    torch.manual_seed(seed)
    num_heads, num_kv_heads = heads
    head_dim, max_pages = 8, 8
    page_ids = (torch.randperm(len(lens) * max_pages) + 1).view(len(lens), max_pages)
    # NaN everywhere that no token was written: reading it would show.
    cache = torch.full((len(lens) * max_pages + 1, 2, num_kv_heads, PAGE, head_dim), torch.nan, dtype=torch.float64)
    queries, wanted, seq_lens = [], [], []
    for i, (num_query, num_before) in enumerate(lens):
        seq_len = num_query + num_before if num_query else 0
        k, v = torch.randn(2, seq_len, num_kv_heads, head_dim, dtype=torch.float64)
        for pos in range(seq_len):
            cache[page_ids[i, pos // PAGE], :, :, pos % PAGE] = torch.stack([k[pos], v[pos]])
        q = torch.randn(num_query, num_heads, head_dim, dtype=torch.float64)
        queries.append(q)
        seq_lens.append(seq_len)
        wanted.append(expected_attention(q, k, v, 0.3, window) if num_query else q)
    starts = torch.tensor([0, *torch.tensor([n for n, _ in lens]).cumsum(0)], dtype=torch.int32)
    lengths = (starts.diff(), torch.tensor(seq_lens, dtype=torch.int32))
    out = paged_attention(torch.cat(queries), cache, PagedRequests(starts, *lengths, page_ids.int()), 0.3, window)
    torch.testing.assert_close(out, torch.cat(wanted), rtol=1e-10, atol=1e-10)

    # Each with two more tokens that are not alive.
    more = torch.cat([torch.cat([q, torch.full((2, num_heads, head_dim), torch.nan)]) for q in queries])
    later = starts + 2 * torch.arange(len(starts)).int()
    out = paged_attention(more, cache, PagedRequests(later, *lengths, page_ids.int()), 0.3, window)
    padded = torch.cat([torch.cat([w, torch.zeros(2, num_heads, head_dim)]) for w in wanted])
    torch.testing.assert_close(out, padded.double(), rtol=1e-10, atol=1e-10)


@settings(max_examples=60, deadline=None)
@given(
    lens=st.lists(
        # (query tokens, tokens before them, how far before the end the first slot is; after it if negative)
        st.tuples(st.integers(1, 9), st.integers(0, 21), st.sampled_from([-3, 0, 1, 2, 4, 5, 8, 13, 30])),
        min_size=1,
        max_size=6,
    ),
    at_borders=st.booleans(),
    heads=st.sampled_from([(1, 1), (4, 2), (9, 3)]),
    window=st.sampled_from([0, 1, 5, 64]),
    seed=st.integers(0, 1000),
)
def test_what_lies_before_the_first_slot_is_not_there(
    lens: list[tuple[int, int, int]], at_borders: bool, heads: tuple[int, int], window: int, seed: int
) -> None:
    torch.manual_seed(seed)
    n, max_pages, (num_heads, num_kv_heads) = len(lens), 9, heads
    page_ids = (torch.randperm(n * max_pages) + 1).view(n, max_pages).int()
    cache = torch.randn(n * max_pages + 1, 2, num_kv_heads, PAGE, 8, dtype=torch.float64)
    query_lens, before, left = torch.tensor(lens, dtype=torch.int32).unbind(1)
    seq_lens = query_lens + before
    first_slots = (seq_lens - left).clamp(min=0)
    if at_borders:
        first_slots -= first_slots % PAGE
    starts = torch.tensor([0, *query_lens.cumsum(0)], dtype=torch.int32)
    q = torch.randn(int(starts[-1]), num_heads, 8, dtype=torch.float64)
    plant_nan(cache, page_ids, first_slots)
    unseeing = hide_queries(q, starts, query_lens, seq_lens, first_slots)
    requests = PagedRequests(starts, query_lens, seq_lens, page_ids, first_slots)
    out = paged_attention(q, cache, requests, 0.3, window)
    expected = dense_attention(q, cache, *requests[:4], 0.3, window, first_slots)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    assert not out[unseeing].any()
    # Slot 0 is the first of all.
    q, cache = q.nan_to_num(0.5), cache.nan_to_num(0.5)
    at_zero, without = (requests._replace(seq_starts=starts) for starts in (torch.zeros_like(first_slots), None))
    assert torch.equal(paged_attention(q, cache, at_zero, 0.3, window), paged_attention(q, cache, without, 0.3, window))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_that_do_not_run_give_zero(dtype: torch.dtype) -> None:
    cache = torch.full((3, 2, 1, PAGE, 8), torch.nan, dtype=dtype)
    q = torch.randn(2, 2, 8, dtype=dtype)
    starts, seq_lens = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([0, 0], dtype=torch.int32)
    requests = PagedRequests(starts, seq_lens + 1, seq_lens, torch.zeros(2, 1, dtype=torch.int32))
    out = paged_attention(q, cache, requests, 1.0, 0)
    assert torch.equal(out, torch.zeros_like(q))
