"""Matrix products of few tokens in Triton, fused with the operations before and after them in a decoder.

A norm between two products is a gain for each column and a factor for each token. The first product applies the gain to
what it stores, and stores the sums of squares of its own columns; the second one adds those up, in order, and
multiplies its sums by the factor. After a product, a gate or the residual stream is applied in registers.

Three kernels do this. With very few tokens and short rows a program loads its weights into registers before the
previous kernel has ended; a single warp needs no barriers. With a few more tokens the weights are in the layout of the
tensor cores, and warps share the columns. Otherwise tiles of the weight, as the tall operand, are streamed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.triton_jit import (
    early_start,
    fetch_ahead,
    jit,
    jit_general,
    let_next_start,
    next_power_of_2,
    tl,
    wait_for_last,
)

_LINE = 128  # bytes of the second-level cache
_HELD_A_WARP = 1024  # numbers that are loaded before a product and used after it


class Tile(NamedTuple):
    """How a product is tiled: tokens, rows of the weight, and columns that are read at once."""

    tokens: int  # 0: weights in registers, tokens one after another
    rows: int
    columns: int  # 0: all at once, shared by the warps
    num_warps: int
    num_stages: int
    ahead: int = 4 << 20  # bytes of a weight that are prefetched while the previous kernel still runs
    late: bool = False  # the next kernel may start only when this one is nearly done


class Scaled(NamedTuple):
    """Tokens that are not yet multiplied by the factor of their norm."""

    x: Tensor  # [num_tokens, in], the gain applied
    squares: Tensor  # [num_tokens, parts] float32: their sum is the sum of squares of the token without the gain
    eps: float


class Epilogue(NamedTuple):
    """What is applied to the sums of a product."""

    bias: Tensor | None = None
    residual: Tensor | None = None
    gain: Tensor | None = None  # of the norm that follows: the scaled result is stored as well
    activation: str = ""  # of the gate, the weight's first half: "silu", "gelu_tanh" or none


class Product(NamedTuple):
    out: Tensor  # [num_tokens, out]
    scaled: Tensor | None  # [num_tokens, out]
    squares: Tensor | None  # [num_tokens, parts] float32


def small_linear(
    x: Tensor | Scaled,  # [num_tokens, in]
    weight: Tensor,  # [out, in], or gates and values, [2 * out, in]
    end: Epilogue,
    tile: Tile,
    dtype: torch.dtype | None = None,  # of the result
) -> Product:
    squares, eps = (x.squares, x.eps) if isinstance(x, Scaled) else (None, 0.0)
    tokens = x.x if isinstance(x, Scaled) else x
    tokens = tokens if tokens.stride(1) == 1 else tokens.contiguous()
    num_tokens, in_size = tokens.shape
    out_size = weight.shape[0] // 2 if end.activation else weight.shape[0]
    num_tiles = -(-out_size // tile.rows)
    out = torch.empty(num_tokens, out_size, dtype=dtype or tokens.dtype, device=tokens.device)
    scaled = None if end.gain is None else torch.empty_like(out)
    sums = None if end.gain is None else torch.empty(num_tokens, num_tiles, dtype=torch.float32, device=tokens.device)
    residual_stride = 0 if end.residual is None else end.residual.stride(0)
    num_parts = 0 if squares is None else squares.shape[1]
    arrays = (tokens, weight, (squares, end.bias, end.residual, end.gain), (out, scaled, sums))
    sizes = (num_tokens, out_size, in_size, num_parts, tokens.stride(0), residual_stride, eps)
    flags = {
        "NORM": squares is not None,
        "BIAS": end.bias is not None,
        "ADD": end.residual is not None,
        "NEXT": end.gain is not None,
        "GATE": end.activation,
        "PARTS": next_power_of_2(num_parts),
        "num_warps": tile.num_warps,
        **early_start(tokens),
    }
    if tile.tokens == 0:
        _vector_kernel[(num_tiles,)](
            *arrays, *sizes, TOKENS=num_tokens, BLOCK_N=tile.rows, BLOCK_K=next_power_of_2(in_size), **flags
        )
        return Product(out, scaled, sums)
    if tile.columns == 0:
        widths = column_parts(in_size, tile.num_warps)
        assert widths is not None and num_tokens <= tile.tokens, "no such tile is a candidate"
        shares = {"WARPS": tile.num_warps, "WIDTHS": widths}
        _held_kernel[(num_tiles,)](*arrays, *sizes, **shares, BLOCK_N=tile.rows, BLOCK_M=tile.tokens, **flags)
        return Product(out, scaled, sums)
    # Columns whose rows together make up the bytes to prefetch, in whole lines.
    lines = max(1, min(tile.ahead // (num_tiles * tile.rows), in_size * weight.element_size()) // _LINE)
    _tile_kernel[(num_tiles, -(-num_tokens // tile.tokens))](
        *arrays,
        *sizes,
        EVEN=in_size % tile.columns == 0,
        BLOCK_M=tile.tokens,
        BLOCK_N=tile.rows,
        BLOCK_K=tile.columns,
        AHEAD=1 << (lines.bit_length() - 1) if tile.ahead else 0,
        LATE=tile.late,
        SOON=tile.tokens * (flags["PARTS"] + tile.rows) <= _HELD_A_WARP * tile.num_warps,
        LINE=_LINE // weight.element_size(),
        num_stages=tile.num_stages,
        **flags,
    )
    return Product(out, scaled, sums)


def column_parts(in_size: int, num_warps: int) -> tuple[int, ...] | None:
    """A warp's share of the columns in pieces, powers of two from 16 on; None if that is impossible."""
    own, rest = divmod(in_size, num_warps)
    if rest or own % 16:
        return None
    return tuple(1 << i for i in reversed(range(own.bit_length())) if own >> i & 1)


@jit
def _gated(gate, value, GATE: tl.constexpr):
    if GATE == "silu":
        return gate * tl.sigmoid(gate) * value
    # (1 + tanh(y)) / 2 is sigmoid(2 y).
    return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * value


@jit
def _ask(
    n,
    m,
    ends,
    num_tokens,
    out_size,
    num_parts,
    residual_stride,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    NEXT: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The inputs of the end of a product: sums of squares, the residual stream, the gain of the next norm."""
    squares, _bias, residual, gain = ends
    found, before, factors = 0.0, 0.0, 0.0
    if NORM:
        p = tl.arange(0, PARTS)
        is_part = (m < num_tokens)[:, None] & (p < num_parts)[None, :]
        found = tl.load(squares + m[:, None] * num_parts + p[None, :], mask=is_part, other=0.0)
    if ADD:
        exists = (n < out_size)[:, None] & (m < num_tokens)[None, :]
        before = tl.load(residual + m[None, :] * residual_stride + n[:, None], mask=exists, other=0.0)
    if NEXT:
        factors = tl.load(gain + n, mask=n < out_size, other=0.0)
    return found, before, factors


@jit
def _finish(
    acc,
    value,
    asked,
    n,
    m,
    ends,
    results,
    num_tokens,
    out_size,
    in_size,
    eps,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    NEXT: tl.constexpr,
    GATE: tl.constexpr,
):
    """The operations after a product, on a tile [rows, tokens] of sums; then the tile is stored."""
    _squares, bias, _residual, _gain = ends
    out, scaled, sums = results
    found, before, factors = asked
    if NORM:
        factor = tl.rsqrt(tl.sum(found, 1) / in_size + eps)[None, :]
        acc *= factor
        value *= factor
    exists = (n < out_size)[:, None] & (m < num_tokens)[None, :]
    if BIAS:
        acc += tl.load(bias + n, mask=n < out_size, other=0.0).to(tl.float32)[:, None]
        if GATE != "":
            value += tl.load(bias + out_size + n, mask=n < out_size, other=0.0).to(tl.float32)[:, None]
    if GATE != "":
        acc = _gated(acc, value, GATE)
    if ADD:
        acc += before.to(tl.float32)
    result = acc.to(out.dtype.element_ty)
    offset = m.to(tl.int64)[None, :] * out_size + n[:, None]
    tl.store(out + offset, result, mask=exists)
    if NEXT:
        wide = tl.where(exists, result.to(tl.float32), 0.0)
        tl.store(scaled + offset, (wide * factors.to(tl.float32)[:, None]).to(scaled.dtype.element_ty), mask=exists)
        num_tiles = tl.num_programs(0)
        tl.store(sums + m * num_tiles + tl.program_id(0), tl.sum(wide * wide, 0), mask=m < num_tokens)


# A single token must not be specialised: all columns of a tile would be one address, and be read one by one.
@jit_general("num_tokens", "out_size", "num_parts")
def _tile_kernel(
    x,
    weight,
    ends,  # squares, bias, residual, gain
    results,  # out, scaled, sums
    num_tokens,
    out_size,
    in_size,
    num_parts,
    x_stride,
    residual_stride,
    eps,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    NEXT: tl.constexpr,
    GATE: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    AHEAD: tl.constexpr,
    LATE: tl.constexpr,
    SOON: tl.constexpr,
    LINE: tl.constexpr,
    EARLY: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    # Rows out of range are computed from an existing row and not stored. Tokens out of range are not read: all programs
    # would read the same one many times.
    row = weight + tl.minimum(n, out_size - 1).to(tl.int64)[:, None] * in_size
    is_token = (m < num_tokens)[None, :]
    token = x + m.to(tl.int64)[None, :] * x_stride
    to_value = out_size.to(tl.int64) * in_size
    if EARLY and AHEAD > 0:
        line = tl.minimum(tl.arange(0, AHEAD) * LINE, in_size - 1)[None, :]
        fetch_ahead(row + line)
        if GATE != "":
            fetch_ahead(row + to_value + line)
    wait_for_last(EARLY)
    if not LATE:
        let_next_start(EARLY)
    if SOON:
        asked = _ask(n, m, ends, num_tokens, out_size, num_parts, residual_stride, NORM, ADD, NEXT, PARTS)
    acc, value = tl.zeros([BLOCK_N, BLOCK_M], tl.float32), tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, in_size, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        if EVEN:
            w = tl.load(row + k[None, :])
            part = tl.load(token + k[:, None], mask=is_token, other=0.0)
        else:
            w = tl.load(row + k[None, :], mask=(k < in_size)[None, :], other=0.0)
            part = tl.load(token + k[:, None], mask=(k < in_size)[:, None] & is_token, other=0.0)
        acc = tl.dot(w, part, acc, input_precision="ieee")
        if GATE != "":
            if EVEN:
                v = tl.load(row + to_value + k[None, :])
            else:
                v = tl.load(row + to_value + k[None, :], mask=(k < in_size)[None, :], other=0.0)
            value = tl.dot(v, part, value, input_precision="ieee")
    if LATE:
        let_next_start(EARLY)
    if not SOON:
        asked = _ask(n, m, ends, num_tokens, out_size, num_parts, residual_stride, NORM, ADD, NEXT, PARTS)
    _finish(
        acc,
        value,
        asked,
        n,
        m,
        ends,
        results,
        num_tokens,
        out_size,
        in_size,
        eps,
        NORM,
        BIAS,
        ADD,
        NEXT,
        GATE,
    )


@jit_general("num_tokens", "out_size", "num_parts")
def _vector_kernel(
    x,
    weight,
    ends,  # squares, bias, residual, gain
    results,  # out, scaled, sums
    num_tokens,
    out_size,
    in_size,
    num_parts,
    x_stride,
    residual_stride,
    eps,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    NEXT: tl.constexpr,
    GATE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    squares, bias, residual, gain = ends
    out, scaled, sums = results
    n, k, p = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), tl.arange(0, PARTS)
    is_row, is_column = n < out_size, k < in_size
    row = weight + n.to(tl.int64)[:, None] * in_size + k[None, :]
    kept = is_row[:, None] & is_column[None, :]
    w = tl.load(row, mask=kept, other=0.0)
    if GATE != "":
        v = tl.load(row + out_size.to(tl.int64) * in_size, mask=kept, other=0.0)
    if BIAS:
        shift = tl.load(bias + n, mask=is_row, other=0.0).to(tl.float32)
        if GATE != "":
            value_shift = tl.load(bias + out_size + n, mask=is_row, other=0.0).to(tl.float32)
    if NEXT:
        factors = tl.load(gain + n, mask=is_row, other=0.0).to(tl.float32)
    wait_for_last(EARLY)
    let_next_start(EARLY)
    # All loads are issued before the first is used. Triton has no unpacking.
    parts, found, before = (), (), ()
    for token in tl.static_range(TOKENS):
        parts = parts + (tl.load(x + token * x_stride + k, mask=is_column, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
        if NORM:
            found = found + (tl.load(squares + token * num_parts + p, mask=p < num_parts, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
        if ADD:
            before = before + (tl.load(residual + token * residual_stride + n, mask=is_row, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    for token in tl.static_range(TOKENS):
        part = parts[token].to(tl.float32)[None, :]  # type: ignore[var-annotated]
        acc = tl.sum(w.to(tl.float32) * part, 1)
        factor = 1.0
        if NORM:
            factor = tl.rsqrt(tl.sum(found[token], 0) / in_size + eps)
        acc = acc * factor
        if BIAS:
            acc += shift
        if GATE != "":
            value = tl.sum(v.to(tl.float32) * part, 1) * factor
            if BIAS:
                value += value_shift
            acc = _gated(acc, value, GATE)
        if ADD:
            acc += before[token].to(tl.float32)
        result = acc.to(out.dtype.element_ty)
        tl.store(out + token * out_size + n, result, mask=is_row)
        if NEXT:
            wide = tl.where(is_row, result.to(tl.float32), 0.0)
            tl.store(scaled + token * out_size + n, (wide * factors).to(scaled.dtype.element_ty), mask=is_row)
            tl.store(sums + token * tl.num_programs(0) + tl.program_id(0), tl.sum(wide * wide, 0))


@jit_general("num_tokens", "out_size", "num_parts")
def _held_kernel(
    x,
    weight,
    ends,  # squares, bias, residual, gain
    results,  # out, scaled, sums
    num_tokens,
    out_size,
    in_size,
    num_parts,
    x_stride,
    residual_stride,
    eps,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    NEXT: tl.constexpr,
    GATE: tl.constexpr,
    WARPS: tl.constexpr,
    WIDTHS: tl.constexpr,  # pieces of a warp's columns
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    n, m, warp = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M), tl.arange(0, WARPS)
    row = weight + tl.minimum(n, out_size - 1).to(tl.int64)[None, :, None] * in_size
    first = warp[:, None, None] * (in_size // WARPS)
    # All loads are issued before the first is used. Triton has no unpacking.
    held, values, parts = (), (), ()
    start = 0
    for i in tl.static_range(len(WIDTHS)):
        k = first + start + tl.arange(0, WIDTHS[i])[None, None, :]
        held = held + (tl.load(row + k),)  # type: ignore[assignment]  # noqa: RUF005
        if GATE != "":
            values = values + (tl.load(row + out_size.to(tl.int64) * in_size + k),)  # type: ignore[assignment]  # noqa: RUF005
        start += WIDTHS[i]
    wait_for_last(EARLY)
    let_next_start(EARLY)
    token = x + m.to(tl.int64)[None, None, :] * x_stride
    start = 0
    for i in tl.static_range(len(WIDTHS)):
        k = first + start + tl.arange(0, WIDTHS[i])[None, :, None]
        parts = parts + (tl.load(token + k, mask=(m < num_tokens)[None, None, :], other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
        start += WIDTHS[i]
    asked = _ask(n, m, ends, num_tokens, out_size, num_parts, residual_stride, NORM, ADD, NEXT, PARTS)
    acc = tl.zeros([WARPS, BLOCK_N, BLOCK_M], tl.float32)
    value = tl.zeros([WARPS, BLOCK_N, BLOCK_M], tl.float32)
    for i in tl.static_range(len(WIDTHS)):
        acc = tl.dot(held[i], parts[i], acc, input_precision="ieee")
        if GATE != "":
            value = tl.dot(values[i], parts[i], value, input_precision="ieee")
    _finish(
        tl.sum(acc, 0),
        tl.sum(value, 0),
        asked,
        n,
        m,
        ends,
        results,
        num_tokens,
        out_size,
        in_size,
        eps,
        NORM,
        BIAS,
        ADD,
        NEXT,
        GATE,
    )
