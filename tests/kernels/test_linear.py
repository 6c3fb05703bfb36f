from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.kernels.linear import PackedWeight, embedding, linear, pack, pack_gated, project


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
    for own in (weight, pack(weight)):
        torch.testing.assert_close(project(x, own, bias).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_tokens", [1, 5, 12, 13, 40])
@pytest.mark.parametrize("size", [1, 15, 16, 33, 128])
def test_gates_in_the_product(num_tokens: int, size: int) -> None:
    x, weight = torch.randn(num_tokens, 48), torch.randn(2 * size, 48)
    packed = pack_gated(weight)
    if packed is None:
        pytest.skip("no C kernels here")
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=1)
    expected = gate / (1 + torch.exp(-gate)) * up
    torch.testing.assert_close(project(x, packed, None).double(), expected, rtol=1e-4, atol=1e-4)


def test_a_packed_product_of_a_token_is_the_same_beside_any_others() -> None:
    """Bit for bit: what verification of several tokens says is what decoding one by one would have said."""
    x, weight = torch.randn(40, 96), torch.randn(70, 96)
    packed = pack(weight)
    if not isinstance(packed, PackedWeight):
        pytest.skip("no C kernels here")
    together = project(x, packed, None)
    for first, end in ((0, 1), (3, 5), (7, 19), (20, 33), (39, 40)):
        assert torch.equal(project(x[first:end], packed, None), together[first:end])


def test_other_types_stay_as_they_are() -> None:
    weight = torch.randn(4, 4, dtype=torch.float64)
    assert pack(weight) is weight
    assert pack_gated(weight) is None
