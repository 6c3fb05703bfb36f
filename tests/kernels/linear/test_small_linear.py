"""All kernels, every tile that may be chosen; what the products mean is tested in ``test_fused_linear``."""

from __future__ import annotations

import pytest
import torch

from slipstream.kernels import triton_jit
from slipstream.kernels.linear.small_linear import Epilogue, Scaled, Tile, column_parts, small_linear
from tests.kernels.triton_check import quietly_interpreted

TILES = [
    *(Tile(0, 2, 0, 4, 1), Tile(0, 8, 0, 4, 1)),
    *(Tile(8, 16, 32, 1, 2), Tile(16, 32, 64, 4, 2, ahead=0, late=True)),
    *(Tile(8, 16, 0, 1, 1), Tile(8, 16, 0, 2, 1), Tile(16, 32, 0, 2, 1)),
]


@pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_any_tile_gives_the_same(tile: Tile, num_tokens: int) -> None:
    x, weight = torch.randn(num_tokens, 96), torch.randn(2 * 21, 96) / 96**0.5
    squares, bias = torch.rand(num_tokens, 5) * 40, torch.randn(42)
    wide = x.double() @ weight.double().t() * torch.rsqrt(squares.double().sum(1, keepdim=True) / 96 + 1e-6) + bias
    gate, up = wide.chunk(2, dim=1)
    with quietly_interpreted():
        made = small_linear(Scaled(x, squares, 1e-6), weight, Epilogue(bias, activation="silu"), tile)
    torch.testing.assert_close(made.out.double(), gate / (1 + torch.exp(-gate)) * up, rtol=1e-5, atol=1e-5)
    assert made.scaled is None


def test_what_each_warp_multiplies() -> None:
    assert (
        column_parts(576, 4) == (128, 16)
        and column_parts(1536, 8) == (128, 64)
        and column_parts(1728, 4)
        == (
            256,
            128,
            32,
            16,
        )
    )
    assert column_parts(576, 8) is None and column_parts(40, 1) is None and column_parts(33, 2) is None


@pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")
@pytest.mark.parametrize("tile", TILES)
def test_a_result_of_another_type(tile: Tile) -> None:
    x, weight = torch.randn(2, 160, dtype=torch.float16), torch.randn(33, 160, dtype=torch.float16)
    with quietly_interpreted():
        out = small_linear(x, weight, Epilogue(), tile, torch.float32).out
    assert out.dtype is torch.float32
    torch.testing.assert_close(out.double(), x.double() @ weight.double().t(), rtol=1e-4, atol=1e-4)
