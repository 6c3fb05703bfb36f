"""How sums are cut, and that no tile is chosen which would cut them in another way."""

from __future__ import annotations

import pytest
import torch

from slipstream.kernels.linear.exact_tiles import MOST_PARTS, cut_of, exact_tile, keeps_cut, num_warps_of
from slipstream.kernels.linear.small_linear import Tile
from slipstream.kernels.tuning.tiles import Weight


def test_a_cut_is_a_function_of_the_shape_alone() -> None:
    for in_size in range(1, 5000, 7):
        parts, width = cut_of(in_size)
        assert 1 <= parts <= MOST_PARTS and parts * width >= in_size > (parts - 1) * width
        assert parts == 1 or width % 64 == 0
    assert cut_of(576) == (3, 192) and cut_of(1536) == (4, 384) and cut_of(4096) == (1, 4096)


def test_tiles_that_do_not_keep_a_cut() -> None:
    cut = cut_of(576)
    assert num_warps_of(cut) == 4
    assert not keeps_cut(Tile(0, 4, 0, 4, 1), cut), "weights in registers, summed as they lie there"
    assert not keeps_cut(Tile(8, 16, 0, 2, 1), cut), "two warps share what three parts are"
    assert not keeps_cut(Tile(8, 16, 256, 4, 2), cut), "columns of two parts at once"
    assert keeps_cut(Tile(8, 16, 256, 4, 2), cut_of(4096))


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 8, 9, 33, 64, 65, 1000])
def test_the_tile_chosen_keeps_the_cut(num_tokens: int) -> None:
    """Of the shapes of published models, with what was measured for their kernels or without."""
    for kind, out_size, in_size in (("norm", 960, 576), ("gated", 1536, 576), ("add", 576, 1536), ("head", 49152, 576)):
        for width, size in ((2, in_size), (4, in_size), (2, 4096)):
            weight = Weight(kind, out_size, size, width)  # type: ignore[arg-type]
            tile = exact_tile(weight, torch.empty(num_tokens, size, device="meta"))
            assert keeps_cut(tile, cut_of(size))
            assert tile.columns > 0 or num_tokens <= tile.tokens
