"""Weights in panels for CPUs, against the same products in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream.kernels.linear.dense_linear import panel_width
from slipstream.weights.dense import DenseWeight
from slipstream.weights.matrix import Matrix, WeightShape
from slipstream.weights.panels import Panels

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(panel_width(CPU, torch.float32) is None, reason="no C kernels here")


def pack(weight: Tensor, activation: str = "", has_bias: bool = False) -> Matrix:
    shape = WeightShape(weight.shape[1], {"part": weight.shape[0]}, activation, has_bias)
    packed = DenseWeight(shape, weight).finish(CPU)
    assert isinstance(packed, Panels)
    return packed


@pytest.mark.parametrize("num_tokens", [*range(1, 18), 33])
@pytest.mark.parametrize("shape", [(1, 1), (7, 16), (130, 37), (64, 576)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products(num_tokens: int, shape: tuple[int, int], with_bias: bool) -> None:
    x, weight = torch.randn(num_tokens, shape[1]), torch.randn(shape)
    bias = torch.randn(shape[0]) if with_bias else None
    expected = x.double() @ weight.double().T + (bias.double() if bias is not None else 0)
    for matrix in (DenseWeight.from_tensor(weight), pack(weight)):
        torch.testing.assert_close(matrix.project(x, bias).double(), expected, rtol=1e-4, atol=1e-4)
        if bias is None:
            torch.testing.assert_close(matrix.project_wide(x).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_tokens", [1, 5, 12, 13, 40])
@pytest.mark.parametrize("size", [1, 15, 16, 33, 128])
@pytest.mark.parametrize(("activation", "with_bias"), [("silu", False), ("silu", True), ("gelu_tanh", False)])
def test_gates(num_tokens: int, size: int, activation: str, with_bias: bool) -> None:
    x, weight = torch.randn(num_tokens, 48), torch.randn(2 * size, 48)
    bias = torch.randn(2 * size) if with_bias else None
    gate, up = (x.double() @ weight.double().T + (bias.double() if bias is not None else 0)).chunk(2, dim=1)
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    gated = gate / (1 + torch.exp(-gate)) if activation == "silu" else gate * (1 + torch.tanh(inner)) / 2
    packed = pack(weight, activation, with_bias)
    assert (packed.in_size, packed.out_size) == (48, size)
    torch.testing.assert_close(packed.project(x, bias).double(), gated * up, rtol=1e-4, atol=1e-4)


def test_a_product_of_a_token_is_the_same_beside_any_others() -> None:
    """Bit for bit: what verification of several tokens says is what decoding one by one would have said."""
    x, packed = torch.randn(40, 96), pack(torch.randn(70, 96))
    together = packed.project(x, None)
    for first, end in ((0, 1), (3, 5), (7, 19), (20, 33), (39, 40)):
        assert torch.equal(packed.project(x[first:end], None), together[first:end])


@pytest.mark.parametrize("activation", ["", "silu"])
@pytest.mark.parametrize("num_rows", [2, 32, 70])
def test_panels_hold_the_same_numbers(num_rows: int, activation: str) -> None:
    weight = torch.randn(num_rows, 24)
    packed = pack(weight, activation)
    assert torch.equal(packed.dequantised(), weight)
    assert packed.nbytes >= weight.nbytes


@pytest.mark.parametrize("with_bias", [False, True])
def test_some_of_the_rows(with_bias: bool) -> None:
    x, weight, bias = torch.randn(5, 24), torch.randn(70, 24), torch.randn(70)
    for matrix in (DenseWeight.from_tensor(weight), pack(weight)):
        part = matrix.rows(16, 40)
        assert torch.equal(part.dequantised(), weight[16:56])
        expected = x @ weight[16:56].T + (bias[16:56] if with_bias else 0)
        torch.testing.assert_close(part.project(x, bias[16:56] if with_bias else None), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kept", [torch.float16, torch.bfloat16])
def test_16_bits_where_they_change_no_number(kept: torch.dtype) -> None:
    """Subnormal numbers of float16 among them. Products are those with panels of float32, to the bit."""
    weight = torch.randn(70, 96).to(kept).float()
    weight[0, :4] = torch.tensor(
        [0.0, -0.0, 2.0**-24, -(2.0**-15)] if kept is torch.float16 else [0.0, -0.0, 1e30, -1.0]
    )
    weight = weight.to(kept).float()
    narrow, off = pack(weight), weight.clone()
    off[3, 5] = 1 + 2.0**-20  # no number of 16 bits
    wide = pack(off)
    assert isinstance(narrow, Panels) and isinstance(wide, Panels)
    assert narrow.panels.dtype == (torch.bfloat16 if torch.equal(weight.bfloat16().float(), weight) else kept)
    assert wide.panels.dtype == torch.float32
    assert narrow.nbytes * 2 == wide.nbytes
    assert torch.equal(narrow.dequantised(), weight)
    rest, bias = [i for i in range(70) if i != 3], torch.randn(70)
    for num_tokens in (1, 5, 12, 24, 25, 61):
        x = torch.randn(num_tokens, 96)
        assert torch.equal(narrow.project(x, bias)[:, rest], wide.project(x, bias)[:, rest])


@pytest.mark.parametrize("num_tokens", [3, 40])
def test_inputs_that_overlap(num_tokens: int) -> None:
    """As the windows of a convolution do."""
    numbers, packed = torch.randn(num_tokens * 2 + 10), pack(weight := torch.randn(33, 12))
    windows = numbers.as_strided((num_tokens, 12), (2, 1))
    expected = windows.double() @ weight.double().T
    torch.testing.assert_close(packed.project(windows, None).double(), expected, rtol=1e-4, atol=1e-4)


def test_other_types_stay_as_they_are() -> None:
    stored = DenseWeight.from_tensor(torch.randn(4, 4, dtype=torch.float64))
    assert stored.finish(CPU) is stored


def test_the_size_is_known_without_memory() -> None:
    """Memory is planned from networks on torch's meta device: what they would be on a CPU."""
    shape = WeightShape(24, {"gate": 35, "up": 35}, "silu")
    with torch.device("meta"):
        planned = DenseWeight(shape).finish(CPU)
    assert isinstance(planned, Panels)
    assert planned.nbytes == pack(torch.randn(70, 24), "silu").nbytes
