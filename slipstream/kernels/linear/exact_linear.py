"""Matrix products whose results do not depend on how many tokens are multiplied together, with what surrounds them.

As in ``small_linear`` a norm between two products is a gain, which the first one stores, and a factor, which the second
one applies to its sums. ``exact_tiles`` says in which order a sum is added up. The sums of squares that give the factor
cross tiles of any size; they are integers, multiples of 2^-28, whose sum is the same in any order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation
from slipstream.kernels.elementwise.geglu import ACTIVATIONS
from slipstream.kernels.linear import exact_kernels
from slipstream.kernels.linear.exact_tiles import Cut, cut_of, exact_tile
from slipstream.kernels.linear.small_linear import Epilogue, Product, Scaled, Tile, column_parts
from slipstream.kernels.triton_jit import early_start, next_power_of_2, runs_triton
from slipstream.kernels.tuning.tiles import Kind, Weight

SQUARE_UNIT = 2.0**-28  # a stream with squares that sum up to 2^35 is beyond 64 bits: a token of 185,000
_LINE = 128  # bytes of the second-level cache
_GROUP = 8  # tiles of tokens that share the rows of a weight in the second-level cache


class Tokens(NamedTuple):
    """What is multiplied: tokens as they are, or still without the factor of their norm."""

    x: Tensor  # [num_tokens, in]
    # [num_tokens, parts] int64 in units of 2^-28, or [num_tokens, 1] float32: the sum of squares, before the gain
    squares: Tensor | None = None
    eps: float = 0.0


def tokens_of(x: Tensor | Scaled) -> Tokens:
    return Tokens(*x) if isinstance(x, Scaled) else Tokens(x)


def _out_size(weight: Tensor, end: Epilogue) -> int:
    return weight.shape[0] // 2 if end.activation else weight.shape[0]


def _product_shape(tokens: Tokens, weight: Tensor, end: Epilogue, wide: bool) -> TensorSpec:
    dtype = torch.promote_types(tokens.x.dtype, torch.float32) if wide else tokens.x.dtype
    return TensorSpec((tokens.x.shape[0], _out_size(weight, end)), dtype)


@operation(_product_shape)
def exact_linear(
    tokens: Tokens,
    weight: Tensor,  # [out, in], or gates and values, [2 * out, in]
    end: Epilogue,  # without a gain
    wide: bool = False,  # the result in float32 at least: logits
) -> Tensor:  # [num_tokens, out]
    if runs_triton(tokens.x):
        return _launch(tokens, weight, end, wide).out
    return _define(tokens, weight, end, wide)


def _scaled_shape(tokens: Tokens, weight: Tensor, end: Epilogue) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
    out = _product_shape(tokens, weight, end, False)
    parts = num_row_tiles(tokens, weight, end) if runs_triton(tokens.x) else 1
    return out, out, TensorSpec((out.shape[0], parts), torch.int64)


@operation(_scaled_shape)
def exact_linear_scaled(
    tokens: Tokens,
    weight: Tensor,  # [out, in]
    end: Epilogue,  # with the gain of the norm that follows
) -> tuple[Tensor, Tensor, Tensor]:  # the result; the same with the gain; its sums of squares, as in Tokens
    assert end.gain is not None
    if runs_triton(tokens.x):
        out, scaled, squares = _launch(tokens, weight, end, False)
        assert scaled is not None
        assert squares is not None
        return out, scaled, squares
    out = _define(tokens, weight, end, False)
    wide = out.to(torch.promote_types(out.dtype, torch.float32))
    return out, (wide * end.gain).to(out.dtype), in_units(wide.square()).sum(1, keepdim=True)


def in_units(squares: Tensor) -> Tensor:
    """Numbers that are not negative, as integers."""
    return (squares / SQUARE_UNIT + 0.5).to(torch.int64)


def _define(tokens: Tokens, weight: Tensor, end: Epilogue, wide: bool) -> Tensor:
    x, squares, eps = tokens
    kind = torch.promote_types(x.dtype, torch.float32)
    x = x.to(kind)
    if squares is not None:
        unit = 1.0 if squares.is_floating_point() else SQUARE_UNIT
        total = squares.sum(1, keepdim=True).to(kind) * unit
        x = x * torch.rsqrt(total / x.shape[1] + eps)
    out = F.linear(x, weight.to(kind), None if end.bias is None else end.bias.to(kind))
    if end.activation:
        out = ACTIVATIONS[end.activation].body(out)
    if end.residual is not None:
        out = out + end.residual
    return out if wide else out.to(tokens.x.dtype)


def choose_tile(tokens: Tokens, weight: Tensor, end: Epilogue, wide: bool) -> tuple[Cut, Tile]:
    kind: Kind = "head" if wide else "plain"
    if end.activation:
        kind = "gated"
    elif end.residual is not None:
        kind = "add"
    elif tokens.squares is not None:
        kind = "norm"
    in_size = tokens.x.shape[1]
    key = Weight(kind, _out_size(weight, end), in_size, tokens.x.element_size())
    return cut_of(in_size), exact_tile(key, tokens.x)


def num_row_tiles(tokens: Tokens, weight: Tensor, end: Epilogue) -> int:
    return -(-_out_size(weight, end) // choose_tile(tokens, weight, end, False)[1].rows)


def _launch(tokens: Tokens, weight: Tensor, end: Epilogue, wide: bool) -> Product:
    return launch_tile(tokens, weight, end, wide, *choose_tile(tokens, weight, end, wide))


def launch_tile(tokens: Tokens, weight: Tensor, end: Epilogue, wide: bool, cut: Cut, tile: Tile) -> Product:
    x, squares, eps = tokens
    x = x if x.stride(1) == 1 else x.contiguous()
    num_tokens, in_size = x.shape
    out_size = _out_size(weight, end)
    num_tiles = -(-out_size // tile.rows)
    out = torch.empty(num_tokens, out_size, dtype=torch.float32 if wide else x.dtype, device=x.device)
    scaled = None if end.gain is None else torch.empty_like(out)
    sums = None if end.gain is None else torch.empty(num_tokens, num_tiles, dtype=torch.int64, device=x.device)
    num_squares = 0 if squares is None else squares.shape[1]
    is_float = squares is not None and squares.is_floating_point()
    assert not is_float or num_squares == 1, "floats are added up elsewhere, in an order that depends on the tile"
    arrays = (x, weight, (squares, end.bias, end.residual, end.gain), (out, scaled, sums))
    sizes = (num_tokens, out_size, in_size, num_squares, x.stride(0))
    rest = (0 if end.residual is None else end.residual.stride(0), eps)
    flags: dict[str, Any] = {
        "NORM": "" if squares is None else "float" if is_float else "integer",
        "BIAS": end.bias is not None,
        "ADD": end.residual is not None,
        "NEXT": end.gain is not None,
        "GATE": end.activation,
        "SQUARES": next_power_of_2(num_squares),
        "UNIT": SQUARE_UNIT,
        "PARTS": cut.parts,
        "WIDTH": cut.width,
        "BLOCK_M": tile.tokens,
        "BLOCK_N": tile.rows,
        "num_warps": tile.num_warps,
        "enable_fp_fusion": False,  # every rounding is written down, so two kernels cannot differ in one
        **early_start(x),
    }
    if tile.columns == 0:
        assert num_tokens <= tile.tokens, "no such tile is a candidate"
        widths = column_parts(cut.width, 1)
        held = {"WARPS": tile.num_warps, "WIDTHS": widths, "EVEN": tile.num_warps * cut.width == in_size}
        exact_kernels.held_kernel[(num_tiles,)](*arrays, *sizes, *rest, **held, **flags)
        return Product(out, scaled, sums)
    num_token_tiles = -(-num_tokens // tile.tokens)
    # Columns whose rows together make up the bytes to prefetch, in whole lines.
    lines = max(1, min(tile.ahead // (num_tiles * tile.rows), in_size * weight.element_size()) // _LINE)
    exact_kernels.tile_kernel[(num_tiles * num_token_tiles,)](
        *arrays,
        *sizes,
        *rest,
        EVEN=in_size % tile.columns == 0 and cut.width % tile.columns == 0,
        BLOCK_K=tile.columns,
        GROUP=_GROUP if num_token_tiles > 1 else 1,
        AHEAD=1 << (lines.bit_length() - 1) if tile.ahead else 0,
        LATE=tile.late,
        LINE=_LINE // weight.element_size(),
        num_stages=tile.num_stages,
        **flags,
    )
    return Product(out, scaled, sums)
