"""Products with quantised weights: as accurate as they claim, and the same whatever is computed beside them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from slipstream.kernels import native
from slipstream.kernels.linear.quant_linear import default_planes, quant_linear
from slipstream.kernels.linear.quant_weights import QuantMatrix, QuantSegment, pack_codes
from tests.kernels.linear.quant_cases import GGUF_KINDS, in_sizes, random_segment

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C kernels here")

# Of a token, relative to float64, whatever outliers it has.
LARGEST_ERROR = {0: 1e-6, 3: 1e-6, 2: 1e-4}
ALL_KINDS = [*GGUF_KINDS, "INT4", "INT8"]


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def activations(num_tokens: int, in_size: int) -> Tensor:
    """With outliers of two sizes, as the inputs of real layers have them, some in a few tokens alone; a token of zeros
    and a tiny one."""
    x = torch.randn(num_tokens, in_size, generator=torch.Generator().manual_seed(0))
    x[:, ::97] *= 12
    x[:, 41] *= 300
    x[3::3, 70] *= 500
    x[1:2] = 0.0
    x[2:3] *= 1e-20
    return x


def segment_of(kind: str, num_rows: int, in_size: int, seed: int = 0) -> tuple[QuantSegment, Tensor]:
    if kind in GGUF_KINDS:
        return random_segment(kind, num_rows, in_size, seed)
    bits = int(kind.removeprefix("INT"))
    codes = torch.randint(0, 2**bits, (num_rows, in_size), dtype=torch.uint8)
    segment = pack_codes(codes, torch.full((num_rows, in_size // 32), 0.01), None, bits, 32)
    assert segment is not None
    return segment, 0.01 * (codes.float() - 2 ** (bits - 1))


def error(out: Tensor, expected: Tensor) -> float:
    """The largest of all tokens."""
    norms = expected.norm(dim=1).clamp_min(1e-300)
    return float(((out.double() - expected).norm(dim=1) / norms).max())


@pytest.mark.parametrize("planes", [0, 2, 3])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_accuracy_against_float64(kind: str, planes: int) -> None:
    for in_size in in_sizes(kind):
        segment, weight = segment_of(kind, 37, in_size)
        x = activations(6, in_size)
        out = quant_linear(x, QuantMatrix((segment,)), None, planes)
        assert error(out, x.double() @ weight.double().T) < LARGEST_ERROR[planes]


@pytest.mark.parametrize("planes", [0, 2, 3])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_token_is_the_same_beside_any_others_and_on_any_number_of_threads(
    kind: str, planes: int, threads: None
) -> None:
    """Bit for bit: what verification of several tokens says is what decoding one by one would have said."""
    in_size = in_sizes(kind)[-1]
    matrix = QuantMatrix((segment_of(kind, 100, in_size)[0],))
    x = activations(100, in_size)
    torch.set_num_threads(1)
    together = quant_linear(x, matrix, None, planes)
    torch.set_num_threads(3)
    assert torch.equal(quant_linear(x, matrix, None, planes), together)
    for first, end in ((0, 1), (3, 5), (7, 10), (20, 24), (30, 38), (99, 100)):
        assert torch.equal(quant_linear(x[first:end], matrix, None, planes), together[first:end])


@pytest.mark.parametrize("planes", [0, 2, 3])
def test_segments_and_bias(planes: int) -> None:
    parts = [segment_of(kind, num_rows, 512) for kind, num_rows in (("Q5_0", 37), ("Q8_0", 16), ("Q6_K", 5))]
    bias, x = torch.randn(58), activations(5, 512)
    out = quant_linear(x, QuantMatrix(tuple(segment for segment, _ in parts)), bias, planes)
    for part, (segment, weight) in zip(out.split([37, 16, 5], dim=1), parts, strict=True):
        alone = quant_linear(x, QuantMatrix((segment,)), None, planes)
        assert error(alone, x.double() @ weight.double().T) < LARGEST_ERROR[planes]
        own_bias = bias[: len(weight)]
        bias = bias[len(weight) :]
        assert torch.equal(part, alone + own_bias)


@pytest.mark.parametrize("planes", [0, 2, 3])
@pytest.mark.parametrize("size", [1, 16, 40])
def test_gates_in_the_product(size: int, planes: int) -> None:
    gates, gate_weight = segment_of("Q4_1", size, 96)
    values, value_weight = segment_of("Q5_0", size, 96, seed=1)
    x = torch.randn(9, 96)
    out = quant_linear(x, QuantMatrix((gates, values), gated=True), None, planes)
    gate, value = x.double() @ gate_weight.double().T, x.double() @ value_weight.double().T
    expected = gate * torch.sigmoid(gate) * value
    largest = max(1e-5, LARGEST_ERROR[planes])
    torch.testing.assert_close(out.double(), expected, rtol=largest, atol=largest * float(expected.abs().max()))


@pytest.mark.parametrize("planes", [0, 2, 3])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_stays_none(value: float, planes: int) -> None:
    matrix = QuantMatrix((segment_of("Q4_1", 20, 96)[0],))
    x = torch.randn(2, 96)
    expected = quant_linear(x, matrix, None, planes)
    x[0, 50] = value
    out = quant_linear(x, matrix, None, planes)
    assert not torch.isfinite(out[0]).any()
    assert torch.equal(out[1], expected[1])


@pytest.mark.parametrize("gated", [False, True])
def test_the_definition_is_what_runs_without_a_compiler(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = tuple(segment_of(kind, 20, 96)[0] for kind in ("Q8_0", "Q5_1"))
    matrix, x = QuantMatrix(parts, gated=gated), torch.randn(3, 96)
    bias = None if gated else torch.randn(40)
    expected = quant_linear(x, matrix, bias, 0)
    monkeypatch.setattr(native, "library", lambda: None)
    torch.testing.assert_close(quant_linear(x, matrix, bias, 0), expected, rtol=1e-4, atol=1e-4)


def test_the_default_is_the_same_where_bytes_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that products are the same on all such CPUs; the accuracy that they have is tested above."""
    monkeypatch.delenv("SLIPSTREAM_CPU_ACTIVATION_BITS", raising=False)
    if " avx2 " not in native.cpu_features():
        pytest.skip("no AVX2 here")
    for isa in ("native", "avx2"):
        monkeypatch.setattr(native, "_isa", isa)
        assert default_planes() == 2
    monkeypatch.setenv("SLIPSTREAM_CPU_ACTIVATION_BITS", "24")
    assert default_planes() == 3


def test_other_builds_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this CPU less is used: lanes are lanes on all machines."""
    if " avx2 " not in native.cpu_features():
        pytest.skip("no AVX2 here")
    x = activations(7, 512)
    matrices = [QuantMatrix((segment_of(kind, 40, 512)[0],)) for kind in ALL_KINDS]
    cases = [(matrix, planes) for matrix in matrices for planes in (0, 2, 3)]
    expected = [quant_linear(x, matrix, None, planes) for matrix, planes in cases]
    monkeypatch.setattr(native, "_isa", "avx2")
    for (matrix, planes), before in zip(cases, expected, strict=True):
        assert torch.equal(quant_linear(x, matrix, None, planes), before)


def test_outliers_alone_need_the_third_byte() -> None:
    """One large number in each of many blocks: 16 bits would lose the small ones beside it."""
    segment, weight = segment_of("Q8_0", 40, 896)
    x = torch.randn(3, 896, generator=torch.Generator().manual_seed(1)) * 1e-3
    x[:, ::300] += 100.0
    small = x.clone()
    small[:, ::300] = 0.0
    matrix = QuantMatrix((segment,))
    large = quant_linear(x - small, matrix, None, 2).double()
    exact = (x - small).double() @ weight.double().T
    assert error(large, exact) < 1e-6
    out = quant_linear(x, matrix, None, 2).double() - exact
    assert error(out, small.double() @ weight.double().T) < 0.05
