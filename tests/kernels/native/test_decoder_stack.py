"""All layers in one call give what the layers give one by one, to the bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.attention.backends.cpu import CpuBackend, InPlace
from slipstream.attention.context import AttentionContext
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.config import EngineOptions
from slipstream.engine.build import build_engine
from slipstream.kernels import native
from slipstream.models.decoder import Decoder
from slipstream.models.heads.eagle3 import Eagle3Head
from tests import tiny_models
from tests.contexts import context_of
from tests.models.heads.test_fused_head import build as build_head
from tests.models.heads.tiny_heads import CASES, VOCAB

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C kernels here")

# Experts, norms after products, a gelu gate or a bias after the gate: layers that the single call does not support.
LAYER_BY_LAYER = ("gemma", "mixtral", "moe", "llama-biases")
# Models whose layers keep states or latents have no such call either; tests/models/test_qwen3_next.py says so.
VARIANTS = [name for name in tiny_models.VARIANTS if not name.startswith(("qwen3-next", "qwen3.5", "deepseek"))]
QUERY_LENS, CONTEXTS = [1, 3, 8, 0, 2], [40, 0, 17, 0, 90]


def step(backend: CpuBackend, kv_caches: list[torch.Tensor], seq_starts: torch.Tensor | None) -> AttentionContext:
    """Five requests on pages of their own; one of them does not run."""
    page_size, max_pages = kv_caches[0].shape[3], 8
    starts = np.concatenate([[0], np.cumsum(QUERY_LENS)]).astype(np.int32)
    lens = np.array([c + q for c, q in zip(CONTEXTS, QUERY_LENS, strict=True)], dtype=np.int32)
    table = torch.arange(1, len(lens) * max_pages + 1, dtype=torch.int32).view(len(lens), max_pages)
    positions = torch.cat([torch.arange(c, c + q) for c, q in zip(CONTEXTS, QUERY_LENS, strict=True)])
    owner = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(QUERY_LENS))
    slots = table[owner, positions // page_size].long() * page_size + positions % page_size
    common = CommonAttentionMetadata(
        num_reqs=len(lens),
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(QUERY_LENS),
        query_start_loc=torch.from_numpy(starts),
        query_start_loc_cpu=starts,
        query_lens=torch.tensor(QUERY_LENS, dtype=torch.int32),
        seq_lens=torch.from_numpy(lens),
        seq_lens_cpu_upper_bound=lens,
        block_table=table,
        slot_mapping=slots,
        seq_starts=seq_starts,
    )
    metadata = backend.build(common)
    assert isinstance(metadata, InPlace)
    return context_of(backend, metadata, kv_caches, positions, slots)


@pytest.mark.parametrize("seq_starts", [None, [33, 2, 0, 5, 91]], ids=["", "starts"])
@pytest.mark.parametrize("kept_in", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_equal_to_the_bit(variant: str, kept_in: torch.dtype, seq_starts: list[int] | None, tmp_path: Path) -> None:
    tiny_models.save(tiny_models.build(variant), tmp_path)
    engine = build_engine(EngineOptions(model=str(tmp_path), dtype="float32"))
    model = engine.core.runner.program.model
    assert isinstance(model, Decoder)
    assert (model.stack is None) == any(kind in variant for kind in LAYER_BY_LAYER)
    torch.manual_seed(0)
    caches = [torch.randn_like(cache).to(kept_in) for cache in engine.core.runner.caches.paged_memory()]
    input_ids = torch.randint(0, 256, (sum(QUERY_LENS),), dtype=torch.int32)
    starts = None if seq_starts is None else torch.tensor(seq_starts, dtype=torch.int32)
    results = []
    for stack in (model.stack, None):
        model.stack = stack
        own = [cache.clone() for cache in caches]
        with torch.inference_mode():
            hidden = model.forward(input_ids, step(CpuBackend(own[0].shape[3], in_place=True), own, starts))
        results.append([hidden, *own])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["eagle3 of NVIDIA", "eagle3, residual normed", "eagle3 of two layers with biases"])
@torch.inference_mode()
def test_a_head_in_one_call(name: str) -> None:
    """Its first layer projects an embedding beside a state, and a norm before the stack makes both."""
    head = build_head(CASES[name](), torch.float32, "cpu")
    assert isinstance(head, Eagle3Head)
    assert head.stack is not None
    head.cos_sin = head.rope_tables(128)
    config, num_tokens = head.config, sum(QUERY_LENS)
    torch.manual_seed(0)
    shape = (len(QUERY_LENS) * 8 + 2, 2, config.num_kv_heads, 16, config.head_dim)
    caches = [torch.randn(shape) for _ in range(config.num_layers)]
    ids, hidden = torch.randint(0, VOCAB, (num_tokens,)).int(), torch.randn(num_tokens, config.hidden_size)
    results = []
    for stack in (head.stack, None):
        head.stack, own = stack, [cache.clone() for cache in caches]
        out = head.forward(0, ids, hidden, step(CpuBackend(16, in_place=True), own, None))
        results.append([out, *own])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)  # a residual beside an embedding is added by another kernel
