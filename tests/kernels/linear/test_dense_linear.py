from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.kernels.linear.dense_linear import embedding, linear


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
