"""The Triton kernels of ``exact_linear``: tiles that are streamed, and weights that are held in registers.

A sum in floating point is either a chain in a tensor core or an addition that is written down here; ``tl.sum`` of
floats would add in an order that depends on the tile.
"""

from __future__ import annotations

from slipstream.kernels.triton_jit import fetch_ahead, jit, jit_general, let_next_start, tl, wait_for_last


@jit
def _gated(gate, value, GATE: tl.constexpr):
    if GATE == "silu":
        return gate * tl.sigmoid(gate) * value
    # (1 + tanh(y)) / 2 is sigmoid(2 y).
    cubic = 0.044715 * gate * gate * gate
    return gate * tl.sigmoid(1.5957691216057308 * (gate + cubic)) * value


@jit
def _ask(
    n,
    m,
    ends,  # squares, bias, residual, gain
    num_tokens,
    out_size,
    num_squares,
    residual_stride,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    NEXT: tl.constexpr,
    SQUARES: tl.constexpr,
):
    """The inputs of the end of a product: sums of squares, the residual stream, the gain of the next norm."""
    squares, _bias, residual, gain = ends
    found, before, factors = 0.0, 0.0, 0.0
    if NORM == "float":
        found = tl.load(squares + m, mask=m < num_tokens, other=0.0)
    if NORM == "integer":
        s = tl.arange(0, SQUARES)
        is_part = (m < num_tokens)[:, None] & (s < num_squares)[None, :]
        found = tl.load(squares + m.to(tl.int64)[:, None] * num_squares + s[None, :], mask=is_part, other=0)
    if ADD:
        exists = (n < out_size)[:, None] & (m < num_tokens)[None, :]
        from_token = residual + m.to(tl.int64)[None, :] * residual_stride
        before = tl.load(from_token + n[:, None], mask=exists, other=0.0)
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
    tile,  # of rows, and how many there are
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
    UNIT: tl.constexpr,
):
    """The operations after a product, on a tile [rows, tokens] of sums; then the tile is stored."""
    _squares, bias, _residual, _gain = ends
    out, scaled, sums = results
    found, before, factors = asked
    if NORM != "":
        total = found if NORM == "float" else tl.sum(found, 1).to(tl.float32) * UNIT
        factor = tl.rsqrt(total / in_size + eps)[None, :]
        acc *= factor
        if GATE != "":
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
        units = (wide * wide / UNIT + 0.5).to(tl.int64)
        tl.store(sums + m.to(tl.int64) * tile[1] + tile[0], tl.sum(units, 0), mask=m < num_tokens)


@jit
def _place(num_tokens, out_size, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """The tiles of rows and of tokens that a program has. Neighbours share rows of the weight where there are many."""
    num_rows, pid = tl.cdiv(out_size, BLOCK_N), tl.program_id(0)
    if GROUP == 1:
        return pid % num_rows, pid // num_rows, num_rows
    first = pid // (GROUP * num_rows) * GROUP
    here = tl.minimum(tl.cdiv(num_tokens, BLOCK_M) - first, GROUP)
    within = pid % (GROUP * num_rows)
    return within // here, first + within % here, num_rows


@jit
def _chain(
    row,
    token,
    to_value,
    is_token,
    first,
    end,
    GATE: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The sums of one part, added along the columns."""
    acc, value = tl.zeros([BLOCK_N, BLOCK_M], tl.float32), tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(first, end, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        if EVEN:
            w = tl.load(row + k[None, :])
            part = tl.load(token + k[:, None], mask=is_token, other=0.0)
        else:
            w = tl.load(row + k[None, :], mask=(k < end)[None, :], other=0.0)
            part = tl.load(token + k[:, None], mask=(k < end)[:, None] & is_token, other=0.0)
        acc = tl.dot(w, part, acc, input_precision="ieee")
        if GATE != "":
            if EVEN:
                v = tl.load(row + to_value + k[None, :])
            else:
                v = tl.load(row + to_value + k[None, :], mask=(k < end)[None, :], other=0.0)
            value = tl.dot(v, part, value, input_precision="ieee")
    return acc, value


# A single token must not be specialised: all columns of a tile would be one address, and be read one by one.
@jit_general("num_tokens", "out_size", "num_squares")
def tile_kernel(
    x,
    weight,
    ends,  # squares, bias, residual, gain
    results,  # out, scaled, sums
    num_tokens,
    out_size,
    in_size,
    num_squares,
    x_stride,
    residual_stride,
    eps,
    NORM: tl.constexpr,  # how sums of squares come: "float", "integer", or not at all
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    NEXT: tl.constexpr,
    GATE: tl.constexpr,
    EVEN: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SQUARES: tl.constexpr,
    UNIT: tl.constexpr,
    GROUP: tl.constexpr,
    AHEAD: tl.constexpr,
    LATE: tl.constexpr,
    LINE: tl.constexpr,
    EARLY: tl.constexpr,
):
    row_tile, token_tile, num_row_tiles = _place(num_tokens, out_size, BLOCK_M, BLOCK_N, GROUP)
    n, m = row_tile * BLOCK_N + tl.arange(0, BLOCK_N), token_tile * BLOCK_M + tl.arange(0, BLOCK_M)
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
    # One part after the other; a sum has its parts added in this order in any kernel.
    acc, value = _chain(
        row, token, to_value, is_token, 0, tl.minimum(WIDTH, in_size), GATE, EVEN, BLOCK_M, BLOCK_N, BLOCK_K
    )
    for i in tl.static_range(1, PARTS):
        end = tl.minimum((i + 1) * WIDTH, in_size)
        more, more_value = _chain(row, token, to_value, is_token, i * WIDTH, end, GATE, EVEN, BLOCK_M, BLOCK_N, BLOCK_K)
        acc += more
        if GATE != "":
            value += more_value
    if LATE:
        let_next_start(EARLY)
    asked = _ask(n, m, ends, num_tokens, out_size, num_squares, residual_stride, NORM, ADD, NEXT, SQUARES)
    tile = (row_tile, num_row_tiles)
    _finish(
        acc,
        value,
        asked,
        n,
        m,
        tile,
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
        UNIT,
    )


@jit
def _joined(sums, WARPS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """[parts, rows, tokens] -> [rows, tokens]: the parts added in order, by additions that are written down."""
    if WARPS == 4:
        by_pair = tl.reshape(tl.permute(sums, (1, 2, 0)), (BLOCK_N, BLOCK_M, 2, 2))
        even, odd = tl.split(by_pair)
        zero, two = tl.split(even)
        one, three = tl.split(odd)
        joined = zero + one + two + three
    else:
        zero, one = tl.split(tl.permute(sums, (1, 2, 0)))
        joined = zero + one
    return joined


@jit_general("num_tokens", "out_size", "num_squares")
def held_kernel(
    x,
    weight,
    ends,  # squares, bias, residual, gain
    results,  # out, scaled, sums
    num_tokens,
    out_size,
    in_size,
    num_squares,
    x_stride,
    residual_stride,
    eps,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    NEXT: tl.constexpr,
    GATE: tl.constexpr,
    EVEN: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    WARPS: tl.constexpr,  # 2 or 4: one for each part
    WIDTHS: tl.constexpr,  # pieces of a part, in order
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SQUARES: tl.constexpr,
    UNIT: tl.constexpr,
    EARLY: tl.constexpr,
):
    n, m, warp = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M), tl.arange(0, WARPS)
    row = weight + tl.minimum(n, out_size - 1).to(tl.int64)[None, :, None] * in_size
    first = warp[:, None, None] * WIDTH
    # All loads are issued before the first is used. Triton has no unpacking.
    held, values, parts = (), (), ()
    start = 0
    for i in tl.static_range(len(WIDTHS)):
        k = first + start + tl.arange(0, WIDTHS[i])[None, None, :]
        held = held + (tl.load(row + k) if EVEN else tl.load(row + k, mask=k < in_size, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
        if GATE != "":
            to_value = row + out_size.to(tl.int64) * in_size
            values = values + (tl.load(to_value + k) if EVEN else tl.load(to_value + k, mask=k < in_size, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
        start += WIDTHS[i]
    wait_for_last(EARLY)
    let_next_start(EARLY)
    token = x + m.to(tl.int64)[None, None, :] * x_stride
    start = 0
    for i in tl.static_range(len(WIDTHS)):
        k = first + start + tl.arange(0, WIDTHS[i])[None, :, None]
        kept = (k < in_size) & (m < num_tokens)[None, None, :]
        parts = parts + (tl.load(token + k, mask=kept, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
        start += WIDTHS[i]
    asked = _ask(n, m, ends, num_tokens, out_size, num_squares, residual_stride, NORM, ADD, NEXT, SQUARES)
    acc = tl.zeros([WARPS, BLOCK_N, BLOCK_M], tl.float32)
    value = tl.zeros([WARPS, BLOCK_N, BLOCK_M], tl.float32)
    for i in tl.static_range(len(WIDTHS)):
        acc = tl.dot(held[i], parts[i], acc, input_precision="ieee")
        if GATE != "":
            value = tl.dot(values[i], parts[i], value, input_precision="ieee")
    tile = (tl.program_id(0), tl.num_programs(0))
    total = _joined(acc, WARPS, BLOCK_N, BLOCK_M)
    other = _joined(value, WARPS, BLOCK_N, BLOCK_M) if GATE != "" else total
    _finish(
        total,
        other,
        asked,
        n,
        m,
        tile,
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
        UNIT,
    )
