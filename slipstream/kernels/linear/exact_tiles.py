"""How a product is added up so that a token's sums do not depend on the tokens beside it, and which tiles keep that.

The columns of a weight are cut into at most four parts, by the weight's shape alone. Within a part numbers are added
along the columns, in order: so do tensor cores, whatever the tile. The parts of a sum are added in order as well. A
tile is free in all else: its tokens, its rows, how many columns it reads at once, its warps.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from slipstream.kernels.linear.small_linear import Tile
from slipstream.kernels.triton_jit import next_power_of_2
from slipstream.kernels.tuning.tiles import Weight, default_tile, measured_tile

MOST_PARTS = 4
_WHOLE_FROM = 2048  # longer rows have outputs enough to fill a GPU with whole sums
_STEP = 64  # columns; parts are multiples of it, so that large tiles waste nothing
_HELD_WIDTH = 512  # a warp holds this many columns of 16 rows in its registers
_MANY_TOKENS = 64  # tiles for more are those of prompts


class Cut(NamedTuple):
    parts: int
    width: int  # columns of a part; the last one may have fewer


def cut_of(in_size: int) -> Cut:
    """A function of the weight's shape alone: never of the number of tokens."""
    if in_size > _WHOLE_FROM:
        return Cut(1, in_size)
    width = -(-in_size // (MOST_PARTS * _STEP)) * _STEP
    return Cut(-(-in_size // width), width)


def num_warps_of(cut: Cut) -> int:
    """Of a tile that is held in registers: one for each part."""
    return next_power_of_2(cut.parts)


def keeps_cut(tile: Tile, cut: Cut) -> bool:
    """Whether a tile adds up in the order of the cut. Tiles that take tokens one by one do not use tensor cores."""
    if tile.tokens == 0:
        return False
    if tile.columns == 0:
        return tile.num_warps == num_warps_of(cut) and cut.parts > 1
    return tile.columns <= cut.width


def exact_tile(weight: Weight, x: Tensor) -> Tile:
    """The tile for so many tokens: as measured where that keeps the cut, else by a heuristic."""
    num_tokens, cut = x.shape[0], cut_of(weight.in_size)
    if num_tokens <= _MANY_TOKENS:
        found = measured_tile(weight, x)
        if found is not None and keeps_cut(found, cut):
            return found
        return _few(weight, num_tokens, cut)
    return _many(weight)


def _few(weight: Weight, num_tokens: int, cut: Cut) -> Tile:
    room = _HELD_WIDTH if weight.kind != "gated" else _HELD_WIDTH // 2
    if num_tokens <= 8 and cut.parts > 1 and cut.width * weight.width <= 2 * room and weight.kind != "head":
        return Tile(8, 16, 0, num_warps_of(cut), 1)
    usual = default_tile(weight, max(2, num_tokens))
    tokens = min(64, max(8, next_power_of_2(num_tokens)))
    columns = min(usual.columns, max(16, _STEP * 2 // weight.width)) if cut.parts > 1 else usual.columns
    if weight.kind == "gated":  # two weights at once, in the shared memory of small GPUs
        columns = min(columns, 2 * _STEP * 2 // weight.width)
    rows = usual.rows if tokens <= usual.tokens else max(64, usual.rows)
    if tokens > usual.tokens:
        columns = min(columns, max(16, 2 * _STEP // weight.width))
    return Tile(tokens, rows, columns, 4 if rows >= 64 else usual.num_warps, 3, usual.ahead, usual.late)


def _many(weight: Weight) -> Tile:
    if weight.width > 2:  # no tensor cores: sums of a tile are in registers that these products fill
        return Tile(64, 32 if weight.kind == "gated" else 64, 32, 4, 2, ahead=0)
    return Tile(128, 64 if weight.kind == "gated" else 128, _STEP, 8, 3, ahead=0)
