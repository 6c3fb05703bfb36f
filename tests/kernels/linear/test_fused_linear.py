"""Norms taken apart and put together again are norms; see ``triton_cases_fused`` for the kernels themselves."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from slipstream.kernels import triton_jit
from slipstream.kernels.elementwise.rms_norm import rms_norm
from slipstream.kernels.linear import fused_linear
from slipstream.kernels.linear.fused_linear import (
    linear_add_scaled,
    linear_scaled,
    scale_tokens,
    scaled_gated,
    scaled_linear,
)
from tests.kernels.triton_check import quietly_interpreted

# Tokens, outputs, inputs.
SIZES = [(1, 24, 40), (3, 96, 576), (9, 33, 100), (40, 48, 64)]


@pytest.mark.parametrize(("num_tokens", "out_size", "in_size"), SIZES)
def test_the_definition_is_a_norm_and_a_product(num_tokens: int, out_size: int, in_size: int) -> None:
    x, gain = torch.randn(num_tokens, in_size, dtype=torch.float64), torch.randn(in_size, dtype=torch.float64)
    weight = torch.randn(2 * out_size, in_size, dtype=torch.float64)
    normed = rms_norm(x, gain, 1e-5)
    parts = (*scale_tokens(x, gain), 1e-5, weight, None)
    torch.testing.assert_close(scaled_linear(*parts), normed @ weight.t())
    gate, up = (normed @ weight.t()).chunk(2, dim=1)
    torch.testing.assert_close(scaled_gated(*parts, "silu"), F.silu(gate) * up)


@pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")
@pytest.mark.parametrize(("num_tokens", "out_size", "in_size"), SIZES)
def test_one_product_hands_its_norm_to_the_next(num_tokens: int, out_size: int, in_size: int) -> None:
    x, weight = torch.randn(num_tokens, in_size), torch.randn(out_size, in_size) / in_size**0.5
    residual, gain, next_weight = torch.randn(num_tokens, out_size), torch.randn(out_size), torch.randn(50, out_size)
    with quietly_interpreted():
        total, scaled, squares = linear_add_scaled.body(x, weight, None, residual, gain)
        out = scaled_linear.body(scaled, squares, 1e-5, next_weight, None)
    expected = residual.double() + x.double() @ weight.double().t()
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(squares.double().sum(1), expected.square().sum(1), rtol=1e-5, atol=1e-5)
    product = rms_norm.body(expected, gain.double(), 1e-5) @ next_weight.double().t()
    torch.testing.assert_close(out.double(), product, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("num_tokens", "out_size", "in_size"), SIZES)
def test_a_product_without_a_residual_hands_its_norm_on_too(
    num_tokens: int, out_size: int, in_size: int, bias: bool
) -> None:
    x, weight = torch.randn(num_tokens, in_size), torch.randn(out_size, in_size) / in_size**0.5
    shift, gain = torch.randn(out_size) if bias else None, torch.randn(out_size)
    with quietly_interpreted():
        total, scaled, squares = linear_scaled.body(x, weight, shift, gain)
    wide = (tensor if tensor is None else tensor.double() for tensor in (x, weight, shift, gain))
    expected = linear_scaled(*wide)
    for actual, double in zip((total, scaled, squares.sum(1, keepdim=True)), expected, strict=True):
        torch.testing.assert_close(actual.double(), double, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(expected[0].float(), torch.nn.functional.linear(x, weight, shift), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(expected[2], expected[0].square().sum(1, keepdim=True))


@pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")
@pytest.mark.parametrize("num_tokens", [1, 33])
def test_a_product_of_the_librarys_is_added_to_a_stream_that_lies_apart(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    """An EAGLE-3 head's residual stream may be half of a wider tensor."""
    torch.manual_seed(0)
    x, weight, gain = torch.randn(num_tokens, 24), torch.randn(40, 24), torch.randn(40)
    residual = torch.randn(num_tokens, 80)[:, 40:]
    expected = linear_add_scaled(x, weight, None, residual, gain)
    monkeypatch.setattr(fused_linear, "prefers_library", lambda x, out_size: True)
    with quietly_interpreted():
        found = linear_add_scaled(x, weight, None, residual, gain)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)
