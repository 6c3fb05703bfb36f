from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.kernels import triton_jit
from slipstream.kernels.elementwise.rms_norm import add_rms_norm, rms_norm
from tests.kernels.triton_check import poisoned_allocations, quietly_interpreted

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def numpy_rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 8), (5, 64), (3, 2, 16)])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    expected = numpy_rms_norm(x.double().numpy(), weight.double().numpy(), 1e-5)
    out = rms_norm(x, weight, 1e-5)
    np.testing.assert_allclose(out.double().numpy(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_add_rms_norm_returns_the_sum_as_residual() -> None:
    x, residual, weight = torch.randn(4, 32), torch.randn(4, 32), torch.randn(32)
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(total, weight, 1e-6))


def test_statistics_do_not_overflow_in_float16() -> None:
    x = torch.full((1, 8), 300.0, dtype=torch.float16)  # its square is not a float16
    torch.testing.assert_close(rms_norm(x, torch.ones(8, dtype=torch.float16), 1e-6), torch.ones_like(x))


needs_triton = pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_kernel_reads_heads_where_they_lie(dtype: torch.dtype) -> None:
    qkv = torch.randn(5, 9, 40).to(dtype)
    weight = torch.randn(40).to(dtype)
    for part in (*qkv.split([5, 2, 2], dim=1), qkv[:, ::3], qkv[1:2, 4:5], qkv[::2]):
        with quietly_interpreted(), poisoned_allocations():
            out, of_copy = rms_norm(part, weight, 1e-5), rms_norm(part.clone(), weight, 1e-5)
        assert out.is_contiguous()
        assert torch.equal(out, of_copy)
        expected = numpy_rms_norm(part.double().numpy(), weight.double().numpy(), 1e-5)
        np.testing.assert_allclose(out.double().numpy(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@needs_triton
def test_kernel_normalises_the_rounded_sum() -> None:
    # 2048 + 1 is no float16: a norm of the sum before rounding would have another second half.
    joint = torch.tensor([1.0, -1.0, 0.3, 2.0]).repeat(3, 16).half()
    x, weight = joint[:, :32], torch.ones(32).half()  # rows apart
    residual = torch.cat([torch.full((3, 16), 2048.0), torch.randn(3, 16)], dim=1).half()
    with quietly_interpreted(), poisoned_allocations():
        normed, total = add_rms_norm(x, residual, weight, 1e-6)
        assert torch.equal(normed, rms_norm(total, weight, 1e-6))
    assert torch.equal(total, x + residual)
    assert normed.is_contiguous() and total.is_contiguous()
