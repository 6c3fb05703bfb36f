"""Layer norms of a sum, against algebra in float64."""

from __future__ import annotations

import pytest
import torch

from slipstream.kernels.elementwise.layer_norm import layer_norm


@pytest.mark.parametrize("has_residual", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_mean_zero_and_variance_one_before_the_weight(has_residual: bool, has_bias: bool) -> None:
    torch.manual_seed(0)
    x, residual, weight, bias = torch.randn(4, 6, 20, dtype=torch.float64)
    out = layer_norm(x, residual if has_residual else None, weight[0], bias[0] if has_bias else None, 1e-5)
    total = x + residual if has_residual else x
    plain = (out - bias[0] if has_bias else out) / weight[0]
    torch.testing.assert_close(plain.mean(1), torch.zeros(6).double(), rtol=0, atol=1e-12)
    variance = total.var(1, correction=0)
    torch.testing.assert_close(plain.square().mean(1), variance / (variance + 1e-5), rtol=1e-12, atol=0)


def test_half_precision_is_summed_in_float32() -> None:
    x = 100 + torch.rand(3, 4096).half()
    out = layer_norm(x, None, torch.ones(4096).half(), None, 1e-5)
    wide = layer_norm(x.double(), None, torch.ones(4096).double(), None, 1e-5)
    torch.testing.assert_close(out.double(), wide, rtol=2e-3, atol=2e-3)
