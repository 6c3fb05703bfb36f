"""All layers in one call with quantised matrices, float32 ones among them: the operations one by one, to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slipstream.kernels import native
from slipstream.kernels.attention.batched_attention import in_place_attention
from slipstream.kernels.attention.paged_attention import PagedRequests
from slipstream.kernels.attention.rope_cache import NewTokens, TokenPlaces, rope_and_cache
from slipstream.kernels.elementwise.rms_norm import add_rms_norm, rms_norm
from slipstream.kernels.linear.dense_linear import PackedWeight, cut_panels, panel_linear, panel_width
from slipstream.kernels.linear.quant_linear import quant_linear
from slipstream.kernels.linear.quant_weights import QuantMatrix, dequantised
from slipstream.kernels.native.decoder_stack import DecoderStack, StackInput, StackLayer, StackMatrix, decoder_stack
from tests.kernels.linear.quant_cases import random_segment

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C kernels here")

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, EPS, SCALE = 64, 4, 2, 16, 96, 1e-5, 0.25
QUERY_LENS, CONTEXTS, PAGE_SIZE, MAX_PAGES = [1, 3, 8], [40, 0, 17], 16, 4
NUM_TOKENS = sum(QUERY_LENS)


def matrix(out_size: int, in_size: int, *kinds: str, gated: bool = False) -> QuantMatrix:
    size = out_size // len(kinds)
    segments = (random_segment(kind, size, in_size, seed)[0] for seed, kind in enumerate(kinds))
    return QuantMatrix(tuple(segments), gated)


def layer(seed: int) -> StackLayer:
    torch.manual_seed(seed)
    qkv_size = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    return StackLayer(
        input_norm=torch.rand(HIDDEN),
        qkv=matrix(qkv_size, HIDDEN, "Q5_0", "Q8_0"),
        qkv_bias=torch.randn(qkv_size),
        q_norm=torch.rand(HEAD_DIM),
        k_norm=torch.rand(HEAD_DIM),
        o=matrix(HIDDEN, HIDDEN, "Q4_0"),
        o_bias=None,
        post_norm=torch.rand(HIDDEN),
        gate_up=matrix(2 * INTERMEDIATE, HIDDEN, "Q4_1", "Q5_1", gated=True),
        down=matrix(HIDDEN, INTERMEDIATE, "Q8_0"),
        window=0 if seed else 20,
    )


def dense(weight: StackMatrix) -> PackedWeight:
    assert isinstance(weight, QuantMatrix)
    width = panel_width(torch.device("cpu"), torch.float32)
    assert width is not None
    return cut_panels(dequantised(weight), width, weight.gated)


class Case:
    """A step of three requests over given layers."""

    def __init__(self, layers: list[StackLayer], planes: int, kept_in: torch.dtype = torch.float32) -> None:
        torch.manual_seed(9)
        self.stack = DecoderStack(layers, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, EPS, SCALE, planes)
        num_pages = len(QUERY_LENS) * MAX_PAGES + 1
        size = (num_pages, 2, KV_HEADS, PAGE_SIZE, HEAD_DIM)
        self.caches = [torch.randn(size).to(kept_in) for _ in layers]
        self.hidden = torch.randn(NUM_TOKENS, HIDDEN)
        self.table = torch.arange(1, num_pages, dtype=torch.int32).view(len(QUERY_LENS), MAX_PAGES)
        pairs = list(zip(CONTEXTS, QUERY_LENS, strict=True))
        self.positions = torch.cat([torch.arange(c, c + q) for c, q in pairs])
        owner = torch.repeat_interleave(torch.arange(len(pairs)), torch.tensor(QUERY_LENS))
        self.page_ids = self.table[owner, self.positions // PAGE_SIZE].long()
        self.offsets = self.positions % PAGE_SIZE
        angles = self.positions[:, None, None] / 100 ** (torch.arange(HEAD_DIM) % (HEAD_DIM // 2) / HEAD_DIM)
        self.cos, self.sin = angles.cos(), angles.sin() * torch.tensor([-1.0, 1.0]).repeat_interleave(HEAD_DIM // 2)
        starts = torch.tensor([0, *QUERY_LENS]).cumsum(0).to(torch.int32)
        lens = [torch.tensor(x, dtype=torch.int32) for x in (QUERY_LENS, [c + q for c, q in pairs])]
        self.tables = (starts, *lens, self.table)

    def at_once(self) -> Tensor:
        arrays = (TokenPlaces(self.cos, self.sin, self.page_ids, self.offsets), PagedRequests(*self.tables))
        return torch.cat(decoder_stack(StackInput(self.hidden, None), self.stack, self.caches, *arrays))

    def one_by_one(self) -> Tensor:
        hidden, residual = self.hidden, torch.zeros_like(self.hidden)
        for own, cache in zip(self.stack.layers, self.caches, strict=True):
            normed, residual = add_rms_norm(hidden, residual, own.input_norm, EPS)
            heads = self.product(normed, own.qkv, own.qkv_bias).view(NUM_TOKENS, -1, HEAD_DIM)
            q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
            assert own.q_norm is not None
            assert own.k_norm is not None
            q, k = (rms_norm(x.contiguous(), norm, EPS) for x, norm in ((q, own.q_norm), (k, own.k_norm)))
            q = rope_and_cache(NewTokens(q, k, v.contiguous(), self.cos, self.sin, self.page_ids, self.offsets), cache)
            mixed = in_place_attention(q, cache, PagedRequests(*self.tables), SCALE, own.window).flatten(1)
            normed, residual = add_rms_norm(self.product(mixed, own.o, None), residual, own.post_norm, EPS)
            hidden = self.product(self.product(normed, own.gate_up, None), own.down, None)
        return torch.cat([hidden, residual])

    def product(self, x: Tensor, weight: StackMatrix, bias: Tensor | None) -> Tensor:
        if isinstance(weight, QuantMatrix):
            return quant_linear(x, weight, bias, self.stack.planes)
        return panel_linear(x, weight.panels, bias, weight.out_size, weight.gated)


@pytest.mark.parametrize("kept_in", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("planes", [0, 2, 3])
def test_equal_to_the_bit(planes: int, kept_in: torch.dtype) -> None:
    first, second = layer(0), layer(1)
    layers = [first, replace(second, o=dense(second.o), gate_up=dense(second.gate_up))]
    results = []
    for run in (Case.at_once, Case.one_by_one):
        case = Case(layers, planes, kept_in)
        results.append([run(case), *case.caches])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("planes", [0, 3])
def test_as_with_the_dequantised_weights(planes: int) -> None:
    layers = [layer(0), layer(1)]
    names = ("qkv", "o", "gate_up", "down")
    plain = [replace(own, **{name: dense(getattr(own, name)) for name in names}) for own in layers]
    expected = Case(plain, 0).at_once()
    torch.testing.assert_close(Case(layers, planes).at_once(), expected, rtol=1e-4, atol=1e-4)
