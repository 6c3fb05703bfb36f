"""A step whose requests begin with common pages: when that pays, and what the Triton backend makes of it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.attention.backend import AttentionLayer
from slipstream.attention.backends import triton as triton_backend
from slipstream.attention.backends.triton import TritonBackend
from slipstream.attention.grouped_query import NewHeads
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.kernels import triton_jit
from slipstream.kernels.attention.cascade_attention import cascade_attention
from slipstream.kernels.attention.rope_cache import HeadNorms
from slipstream.kernels.elementwise.rms_norm import rms_norm
from slipstream.scheduler import cascade
from slipstream.scheduler.cascade import least_saved, pays
from tests.contexts import context_of
from tests.kernels.attention.dense_attention import dense_attention
from tests.kernels.triton_check import quietly_interpreted

# Llama 3.1 8B in bfloat16: 32 layers, 8 key heads of 128.
LAYER_BYTES, LAYERS = 2 * 8 * 128 * 2, 32


def test_what_a_step_must_save() -> None:
    """On an NVIDIA H200 attention of 64 requests over 2,048 common tokens is 85 us a layer, and 73 with a cascade."""
    least = least_saved(LAYER_BYTES, LAYERS, 0, "full")
    assert least is not None and 200_000 < least < 300_000
    assert not pays(2, 2, 30_000, least), "two requests with a long document: a graph is worth more"
    assert not pays(64, 64, 2048, least), "many with a system prompt: 12 us a layer are not worth a graph"
    assert pays(64, 64, 8192, least), "many with a document"
    assert not pays(1, 1, 10**9, least), "one has nothing in common with anybody"


def test_the_more_of_a_plain_step_is_in_graphs_the_more_there_is_to_lose() -> None:
    least = [least_saved(LAYER_BYTES, LAYERS, 0, mode) for mode in ("none", "piecewise", "full_and_piecewise", "full")]
    assert least == sorted(least, key=lambda n: n or 0) and least[0] == least[1] and least[1] != least[3]


def test_layers_with_a_window_save_nothing() -> None:
    assert least_saved(LAYER_BYTES, LAYERS, LAYERS, "full") is None
    plain, half = (least_saved(LAYER_BYTES, LAYERS, n, "full") for n in (0, LAYERS // 2))
    assert plain is not None and half is not None and 1.5 * plain < half < 2 * plain


def test_a_step_of_prompts_goes_the_plain_way() -> None:
    assert pays(4, cascade.MAX_TOKENS, 100, 300) and not pays(4, cascade.MAX_TOKENS + 1, 100, 300)


# --- the backend ------------------------------------------------------------------------------------

PAGE, HEADS, KV_HEADS, DIM, MAX_PAGES, COMMON = 4, 4, 2, 32, 12, 3
SEQ_LENS = (13, 40, 33, 24)


def step(query_lens: tuple[int, ...], num_common: int) -> tuple[CommonAttentionMetadata, Tensor]:
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    positions = torch.cat([torch.arange(s - n, s) for s, n in zip(SEQ_LENS, query_lens, strict=True)])
    owner = torch.repeat_interleave(torch.arange(len(SEQ_LENS)), torch.tensor(query_lens))
    table = 1 + torch.randperm(len(SEQ_LENS) * MAX_PAGES).view(len(SEQ_LENS), MAX_PAGES).int()
    table[:, :num_common] = table[0, :num_common]
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
        num_common_pages=num_common,
    )
    return common, positions


@pytest.fixture
def cascades(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Common tokens of every layer that went that way."""
    seen: list[int] = []

    def count(*args: Any) -> Tensor:
        seen.append(args[-1])
        return cascade_attention(*args)

    monkeypatch.setattr(triton_backend, "cascade_attention", count)
    return seen


@pytest.mark.parametrize("query_lens", [(1, 1, 1, 1), (1, 12, 1, 2)], ids=["decode", "mixed"])
@pytest.mark.parametrize(("window", "num_common"), [(0, COMMON), (7, COMMON), (0, 0)], ids=["", "window", "plain"])
def test_new_tokens_are_stored_and_attended(
    window: int, num_common: int, query_lens: tuple[int, ...], cascades: list[int]
) -> None:
    torch.manual_seed(0)
    backend, (common, positions) = TritonBackend(), step(query_lens, num_common)
    cache = torch.randn(len(SEQ_LENS) * MAX_PAGES + 2, 2, KV_HEADS, PAGE, DIM)
    cache[0] = 0.0
    q, k, v = (torch.randn(len(positions), heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    no_turn = torch.zeros(64, 2, DIM // 2)
    no_turn[:, 0] = 1.0
    norms = HeadNorms(torch.rand(DIM), torch.rand(DIM), 1e-5)
    # Interpreted where it is the cascade's turn, in the batch that takes less time.
    with quietly_interpreted() if triton_jit.is_available() and num_common and max(query_lens) > 1 else nullcontext():
        context = context_of(backend, backend.build(common), [cache], positions, common.slot_mapping)
        out = context.run(AttentionLayer(0, HEADS, KV_HEADS, DIM, 0.3, window), NewHeads(q, k, v, no_turn, norms))
    tables = (common.query_start_loc, common.query_lens, common.seq_lens, common.block_table)
    expected = dense_attention(rms_norm.body(q, norms.query, norms.eps), cache, *tables, 0.3, window)
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)
    assert cascades == ([COMMON * PAGE] if num_common and not window else [])


def test_a_drafter_that_shares_the_metadata_goes_the_plain_way(cascades: list[int]) -> None:
    backend, (common, positions) = TritonBackend(), step((1, 1, 1, 1), COMMON)
    own = backend.starting_at(backend.build(common), torch.zeros(4, dtype=torch.int32))
    assert own.common.num_common_pages == 0
    cache = torch.randn(len(SEQ_LENS) * MAX_PAGES + 2, 2, KV_HEADS, PAGE, DIM)
    layer, q = AttentionLayer(0, HEADS, KV_HEADS, DIM, 0.3), torch.randn(len(positions), HEADS, DIM)
    backend.run(layer, q, cache, own)
    assert not cascades
    with pytest.raises(AssertionError, match="a drafter's keys"):
        backend.run(layer, q, cache, backend.build(replace(common, seq_starts=torch.zeros(4, dtype=torch.int32))))
