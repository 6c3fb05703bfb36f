"""Packing takes codes and scales over exactly; the oracle is the ``gguf`` package, or the formula of a format."""

from __future__ import annotations

from itertools import pairwise

import gguf
import numpy as np
import pytest
import torch

from slipstream.kernels import native
from slipstream.kernels.linear.quant_linear import quant_embedding
from slipstream.kernels.linear.quant_weights import PanelMemory, QuantMatrix, dequantised, pack_codes, pack_gguf
from tests.kernels.linear.quant_cases import GGUF_KINDS, in_sizes, random_rows, random_segment, reference

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C kernels here")


@pytest.mark.parametrize("num_rows", [1, 16, 37])
@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_panels_hold_what_the_file_holds(kind: str, num_rows: int) -> None:
    for in_size in in_sizes(kind):
        segment, weight = random_segment(kind, num_rows, in_size)
        matrix = QuantMatrix((segment,))
        assert (matrix.out_size, matrix.in_size) == weight.shape
        assert torch.equal(dequantised(matrix), weight)
        assert torch.equal(quant_embedding(torch.arange(num_rows, dtype=torch.int32), matrix), weight)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_what_the_package_quantised(kind: str) -> None:
    """Real scales instead of drawn ones, zeros and outliers among the weights."""
    weight = np.random.default_rng(0).normal(size=(20, 896)).astype(np.float32)
    weight[3] = 0.0
    weight[5, ::97] *= 50
    raw = gguf.quantize(weight, gguf.GGMLQuantizationType[kind])
    segment = pack_gguf(torch.from_numpy(raw), kind)
    assert segment is not None
    assert torch.equal(dequantised(QuantMatrix((segment,))), reference(kind, raw))


@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_panels_are_hardly_larger_than_the_file(kind: str) -> None:
    in_size = in_sizes(kind)[-1]
    raw = random_rows(kind, 64, in_size)
    segment = pack_gguf(torch.from_numpy(raw), kind)
    assert segment is not None
    assert raw.nbytes <= QuantMatrix((segment,)).nbytes <= 1.03 * raw.nbytes


def test_rows_in_another_order() -> None:
    raw = random_rows("Q5_0", 40, 96)
    order = torch.randperm(40)
    segment = pack_gguf(torch.from_numpy(raw), "Q5_0", order)
    assert segment is not None
    assert torch.equal(dequantised(QuantMatrix((segment,))), reference("Q5_0", raw)[order])
    with pytest.raises(ValueError, match="order"):
        pack_gguf(torch.from_numpy(raw), "Q5_0", order + 1)


def test_parts_of_one_matrix_have_types_of_their_own() -> None:
    parts = [random_segment(kind, num_rows, 512) for kind, num_rows in (("Q5_0", 37), ("Q8_0", 16), ("Q6_K", 5))]
    matrix = QuantMatrix(tuple(segment for segment, _ in parts))
    assert torch.equal(dequantised(matrix), torch.cat([weight for _, weight in parts]))
    with pytest.raises(ValueError, match="different sizes"):
        QuantMatrix((parts[0][0], random_segment("Q8_0", 16, 96)[0]))
    with pytest.raises(ValueError, match="gates"):
        QuantMatrix((parts[0][0], parts[1][0]), gated=True)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128, 0])
@pytest.mark.parametrize("with_zeros", [False, True])
def test_codes_with_scales(bits: int, group_size: int, with_zeros: bool) -> None:
    """As in safetensors: 16-bit scales, so that scale * (code - zero) is exact in float32."""
    num_rows, in_size = 37, 576
    group_size = group_size or in_size
    num_groups = -(-in_size // group_size)
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (num_rows, in_size), dtype=torch.uint8, generator=generator)
    scales = torch.rand(num_rows, num_groups, generator=generator).to(torch.bfloat16)
    zeros = torch.randint(0, 2**bits, scales.shape, generator=generator) if with_zeros else None
    segment = pack_codes(codes, scales, zeros, bits, group_size)
    assert segment is not None
    matrix = QuantMatrix((segment,))
    zero = torch.full(scales.shape, 2 ** (bits - 1)) if zeros is None else zeros
    spread = [t.double().repeat_interleave(group_size, dim=1)[:, :in_size] for t in (scales, zero)]
    expected = (spread[0] * (codes.double() - spread[1])).float()
    assert torch.equal(dequantised(matrix), expected)
    assert torch.equal(quant_embedding(torch.arange(num_rows), matrix), expected)


def test_an_input_size_that_is_no_whole_block() -> None:
    codes = torch.randint(0, 256, (5, 50), dtype=torch.uint8)
    segment = pack_codes(codes, torch.ones(5, 1), None, 8, 50)
    assert segment is not None
    assert torch.equal(dequantised(QuantMatrix((segment,))), codes.float() - 128)


def test_what_has_no_panels() -> None:
    assert pack_gguf(torch.zeros(4, 84, dtype=torch.uint8), "Q2_K") is None
    with pytest.raises(ValueError, match="no rows"):
        pack_gguf(torch.zeros(4, 19, dtype=torch.uint8), "Q4_0")
    with pytest.raises(ValueError, match="no panels"):
        pack_codes(torch.zeros(4, 96, dtype=torch.uint8), torch.ones(4, 4), None, 4, 24)
    with pytest.raises(ValueError, match="do not go"):
        pack_codes(torch.zeros(4, 96, dtype=torch.uint8), torch.ones(4, 2), None, 4, 32)


def test_token_ids_beyond_the_embedding() -> None:
    matrix = QuantMatrix((random_segment("Q8_0", 20, 96)[0],))
    for token_id in (-1, 20):
        with pytest.raises(IndexError):
            quant_embedding(torch.tensor([0, token_id], dtype=torch.int32), matrix)


def test_memory_of_a_model() -> None:
    """Matrices lie side by side and do not touch each other, large ones included."""
    memory = PanelMemory()
    sizes = (70, 64, 1, 65 << 20, 64)
    parts = [memory.take(size) for size in sizes]
    assert [part.numel() for part in parts] == list(sizes)
    assert all(part.data_ptr() % 64 == parts[0].data_ptr() % 64 for part in parts[1:3])
    ranges = sorted((part.data_ptr(), part.data_ptr() + part.numel()) for part in parts)
    assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
    raw = random_rows("Q5_0", 40, 96)
    segment = pack_gguf(torch.from_numpy(raw), "Q5_0", memory=memory)
    assert segment is not None
    assert torch.equal(dequantised(QuantMatrix((segment,))), reference("Q5_0", raw))
