from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.attention.backend import AttentionLayer
from slipstream.attention.backends.cpu import CpuBackend
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.kernels import native
from slipstream.kernels.attention.batched_attention import in_place_attention
from slipstream.kernels.attention.paged_attention import PagedRequests, paged_attention
from tests.kernels.attention.dense_attention import dense_attention, hide_queries, plant_nan

PAGE = 4


@settings(max_examples=60, deadline=None)
@given(
    lens=st.lists(
        # (living query tokens, tokens before them, how far the bound is above, tokens that are not alive)
        st.tuples(st.integers(1, 9) | st.integers(10, 150), st.integers(0, 21), st.integers(5, 9), st.integers(0, 4)),
        min_size=1,
        max_size=8,
    ),
    head_dim=st.sampled_from([8, 64]),
    heads=st.sampled_from([(1, 1), (4, 2), (9, 3), (7, 1)]),
    window=st.sampled_from([0, 1, 5, 64]),
    unused=st.booleans(),
    in_place=st.booleans(),
    kept_in=st.sampled_from([None, torch.float16, torch.bfloat16]),
    # How far before each request's end its first slot is; after it if negative.
    starts_at=st.none() | st.lists(st.sampled_from([-2, 0, 1, 3, 4, 7, 10, 60, 500]), min_size=8, max_size=8),
    causal=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_equals_the_definition(
    lens: list[tuple[int, int, int, int]],
    head_dim: int,
    heads: tuple[int, int],
    window: int,
    unused: bool,
    in_place: bool,
    kept_in: torch.dtype | None,
    starts_at: list[int] | None,
    causal: bool,
    seed: int,
) -> None:
    """Any mix of query lengths, bounds above the truth, rows that do not run, NaN in every unwritten slot."""
    torch.manual_seed(seed)
    window = window if causal else 0
    in_place = in_place and native.library() is not None
    dtype = torch.float32 if in_place else torch.float64
    num_heads, num_kv_heads = heads
    max_pages, n = 45, len(lens)  # for the largest bound
    page_ids = (torch.randperm(n * max_pages) + 1).view(n, max_pages).int()
    cache = torch.full((n * max_pages + 1, 2, num_kv_heads, PAGE, head_dim), torch.nan, dtype=dtype)
    cache[0] = 0.0  # the null page
    seq_lens = [query + before for query, before, _, _ in lens]
    for i, seq_len in enumerate(seq_lens):
        for pos in range(seq_len):
            cache[page_ids[i, pos // PAGE], :, :, pos % PAGE] = torch.randn(2, num_kv_heads, head_dim)
    cache = cache if kept_in is None else cache.to(kept_in)
    bounds = torch.tensor([s + slack for s, (_, _, slack, _) in zip(seq_lens, lens, strict=True)], dtype=torch.int32)
    exact = torch.tensor(seq_lens, dtype=torch.int32)
    if unused:
        exact[n // 2] = 0
    starts = torch.tensor([0, *(query + more for query, _, _, more in lens)]).cumsum(0).int()
    query_lens = torch.tensor([query for query, _, _, _ in lens], dtype=torch.int32)
    q = torch.randn(int(starts[-1]), num_heads, head_dim, dtype=dtype)
    first_slots = None
    if starts_at is not None:
        first_slots = (torch.tensor(seq_lens) - torch.tensor(starts_at[:n])).clamp(min=0).int()
        plant_nan(cache, page_ids, first_slots)
        if causal:
            hide_queries(q, starts, query_lens, torch.tensor(seq_lens), first_slots)
    common = CommonAttentionMetadata(
        num_reqs=n,
        num_actual_tokens=len(q),
        max_query_len=max(query + more for query, _, _, more in lens),
        query_start_loc=starts,
        query_start_loc_cpu=starts.numpy(),
        query_lens=query_lens,
        seq_lens=exact,
        seq_lens_cpu_upper_bound=bounds.numpy(),
        block_table=page_ids,
        slot_mapping=torch.empty(0),
        seq_starts=first_slots,
        is_causal=causal,
    )
    backend = CpuBackend(PAGE, in_place, head_dim)
    layer = AttentionLayer(0, num_heads, num_kv_heads, head_dim, scale=0.3, window=window)
    out = backend.run(layer, q, cache, backend.build(common))
    tables = (starts, query_lens, exact, page_ids)
    if first_slots is None and kept_in is None:
        expected = paged_attention(q, cache, PagedRequests(*tables), 0.3, window, causal)
    else:
        expected = dense_attention(q, cache, *tables, 0.3, window, first_slots, causal).to(dtype)
        assert first_slots is None or out.isfinite().all(), "unused slots and stopped rows too"
    owner = torch.repeat_interleave(torch.arange(n), starts.diff())
    alive = (exact[owner] > 0) & (torch.arange(len(q)) - starts[owner] < query_lens[owner])
    tolerance = 1e-5 if in_place else 1e-10
    torch.testing.assert_close(out[alive], expected[alive], rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(native.library() is None, reason="no C kernels here")
@pytest.mark.parametrize("head_dim", [8, 64, 80])
@pytest.mark.parametrize("kept_in", [torch.float32, torch.float16, torch.bfloat16])
def test_a_token_alone_is_the_same_to_the_bit(kept_in: torch.dtype, head_dim: int) -> None:
    """Whatever else the step computes: other requests, and draft tokens after it."""
    torch.manual_seed(0)
    lens, contexts, max_pages = [4, 1, 8], [70, 33, 150], 40
    table = torch.arange(1, 3 * max_pages + 1, dtype=torch.int32).view(3, max_pages)
    cache = torch.randn(3 * max_pages + 1, 2, 2, PAGE, head_dim).to(kept_in)
    q = torch.randn(sum(lens), 6, head_dim)
    ends = torch.tensor([c + n for c, n in zip(contexts, lens, strict=True)], dtype=torch.int32)
    starts = torch.tensor([0, 4, 5, 13], dtype=torch.int32)
    together = in_place_attention(q, cache, PagedRequests(starts, starts.diff(), ends, table), 0.3, 0)
    one, bounds = torch.ones(1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    for i, (num_tokens, context) in enumerate(zip(lens, contexts, strict=True)):
        for j in range(num_tokens):
            token, end = slice(int(starts[i]) + j, int(starts[i]) + j + 1), (context + j + 1) * one
            request = PagedRequests(bounds, one, end, table[i : i + 1])
            alone = in_place_attention(q[token], cache, request, 0.3, 0)
            assert torch.equal(alone, together[token])


@pytest.mark.skipif(native.library() is None, reason="no C kernels here")
@pytest.mark.parametrize("heads", [(6, 2), (2, 2)], ids=["groups", "each its own"])
def test_where_all_tokens_see_the_same_their_number_changes_no_bit(heads: tuple[int, int]) -> None:
    torch.manual_seed(0)
    num_entries, max_pages = 70, 20
    table = torch.arange(1, max_pages + 1, dtype=torch.int32).view(1, max_pages)
    cache = torch.randn(max_pages + 1, 2, heads[1], PAGE, 64)
    q, length = torch.randn(8, heads[0], 64), torch.tensor([num_entries], dtype=torch.int32)

    def attend(tokens: slice) -> torch.Tensor:
        count = torch.tensor([tokens.stop - tokens.start], dtype=torch.int32)
        starts = torch.tensor([0, int(count)], dtype=torch.int32)
        return in_place_attention(q[tokens], cache, PagedRequests(starts, count, length, table), 0.3, 0, causal=False)

    together = attend(slice(0, 8))
    for first, end in [*((i, i + 1) for i in range(8)), (0, 3), (1, 6), (2, 4)]:
        assert torch.equal(attend(slice(first, end)), together[first:end])
