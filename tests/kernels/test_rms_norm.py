from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.kernels.rms_norm import add_rms_norm, rms_norm

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
