"""Dense layers after pooling, against algebra."""

from __future__ import annotations

import torch

from slipstream.kernels.step.dense_step import ACTIVATIONS, dense_step


def test_products_and_activations() -> None:
    torch.manual_seed(1)
    x, weight, bias = torch.randn(5, 3).half(), torch.randn(4, 3), torch.randn(4)
    plain = dense_step(x, weight, bias, "")
    assert plain.dtype is torch.float32
    expected = (x.double().unsqueeze(1) * weight.double()).sum(2)
    torch.testing.assert_close(plain.double(), expected + bias.double(), rtol=1e-5, atol=1e-6)
    for name in ACTIVATIONS:
        torch.testing.assert_close(dense_step(x, weight, bias, name), ACTIVATIONS[name](plain))
    torch.testing.assert_close(dense_step(x, weight, None, "tanh").double(), torch.tanh(expected), rtol=1e-5, atol=1e-6)
