"""Plain weights rounded to eight bits: the published block format, products, sizes planned without memory."""

from __future__ import annotations

import pytest
import torch
from gguf import GGMLQuantizationType as Q
from gguf.quants import quantize

from slipstream.kernels import native
from slipstream.weights.dense import DenseWeight
from slipstream.weights.eight_bits import EightBits, can_round, quantise_rows
from slipstream.weights.matrix import StoredWeight, WeightShape

SHAPE = WeightShape(96, {"q_proj": 40, "k_proj": 24})
needs_kernels = pytest.mark.skipif(native.library() is None, reason="no C kernels here")


def loaded(weight: torch.Tensor) -> StoredWeight:
    stored = EightBits().open(SHAPE)
    start = 0
    for name, slot in stored.slots("layer."):
        assert isinstance(slot, torch.Tensor) and name.startswith("layer.")
        slot.copy_(weight[start : start + len(slot)])
        start += len(slot)
    assert start == len(weight)
    return stored


def test_blocks_are_those_of_the_gguf_package() -> None:
    torch.manual_seed(0)
    weight = torch.randn(50, 96)
    weight[3] = 0
    weight[4, 40] = 1e4
    expected = quantize(weight.numpy(), Q.Q8_0)
    assert torch.equal(quantise_rows(weight), torch.from_numpy(expected).view(torch.uint8))


@needs_kernels
def test_products_and_numbers() -> None:
    torch.manual_seed(1)
    weight, x = torch.randn(64, 96), torch.randn(5, 96)
    matrix = loaded(weight).finish(torch.device("cpu"))
    assert matrix.formats() == {"Q8_0": 64 * 96}
    numbers = matrix.dequantised()
    largest = weight.view(64, 3, 32).abs().amax(2, keepdim=True)
    off = (numbers - weight).view(64, 3, 32).abs()
    assert bool((off <= largest * (0.5 / 127 + 2**-10)).all()), "half a step, and a scale of 16 bits"
    exact = x.double() @ numbers.double().T
    assert float((matrix.project(x, None).double() - exact).norm() / exact.norm()) < 1e-4
    assert matrix.rows(40, 24).project(x, None).shape == (5, 24)


@needs_kernels
def test_the_size_is_known_without_memory() -> None:
    real = loaded(torch.randn(64, 96)).finish(torch.device("cpu"))
    with torch.device("meta"):
        assert can_round()
        planned = EightBits().open(SHAPE)
    matrix = planned.finish(torch.device("cpu"))
    assert (matrix.nbytes, matrix.formats()) == (real.nbytes, real.formats())


def test_a_plan_for_another_device_is_not_rounded() -> None:
    with torch.device("meta"):
        planned = EightBits().open(SHAPE)
    assert planned.finish(torch.device("cuda")).nbytes == 64 * 96 * 4


def test_rows_that_are_no_whole_blocks_and_tables_stay() -> None:
    assert isinstance(EightBits().open(WeightShape(48, {"fc": 8})), DenseWeight)
    table = EightBits().format_of_table("embed_tokens").open(WeightShape(96, {"embed_tokens": 8}))
    assert isinstance(table, DenseWeight)
