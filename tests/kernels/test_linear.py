from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.kernels.linear import embedding, linear, pack


@pytest.mark.parametrize("num_tokens", [1, 3, 17])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_is_x_times_weight_transposed(num_tokens: int, with_bias: bool) -> None:
    rng = np.random.default_rng(num_tokens)
    x, weight, bias = rng.normal(size=(num_tokens, 24)), rng.normal(size=(40, 24)), rng.normal(size=40)
    expected = x @ weight.T + (bias if with_bias else 0)
    out = linear(torch.tensor(x), torch.tensor(weight), torch.tensor(bias) if with_bias else None)
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-12)


def test_embedding_takes_rows() -> None:
    weight = torch.arange(12.0).view(4, 3)
    out = embedding(weight, torch.tensor([3, 0, 3], dtype=torch.int32))
    assert out.tolist() == [[9, 10, 11], [0, 1, 2], [9, 10, 11]]


@pytest.mark.parametrize("num_tokens", [*range(1, 18), 33])
@pytest.mark.parametrize("shape", [(1, 1), (7, 16), (130, 37), (64, 576)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_float32_as_stored_and_packed(num_tokens: int, shape: tuple[int, int], with_bias: bool) -> None:
    x, weight = torch.randn(num_tokens, shape[1]), torch.randn(shape)
    bias = torch.randn(shape[0]) if with_bias else None
    expected = x.double() @ weight.double().T + (bias.double() if bias is not None else 0)
    for own in (weight, pack(weight), weight.t().contiguous().t()):
        torch.testing.assert_close(linear(x, own, bias).double(), expected, rtol=1e-4, atol=1e-4)


def test_large_weights_are_blocked() -> None:
    for shape in ((5000, 1024), (96, 64)):
        x, weight = torch.randn(3, shape[1]), torch.randn(shape)
        # By its body: the blocked layout is opaque, so the checks around an operation cannot copy it.
        torch.testing.assert_close(linear.body(x, pack(weight), None), x @ weight.T, rtol=1e-4, atol=1e-3)
