"""Hidden states into one vector for each text: of one token, a mean of all, or their largest entries.

A text may come in several chunks. What is needed of the earlier ones is kept for each request row, so that the vector
does not depend on where the chunks end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.device.operation import operation
from slipstream.kernels.triton_jit import (
    early_start,
    jit_general,
    let_next_start,
    next_power_of_2,
    runs_triton,
    tl,
    wait_for_last,
)
from slipstream.pooling import PoolingKind

_MOST_COLUMNS, _TOKENS = 128, 16  # in one tile


class PooledRequests(NamedTuple):
    """A run of a step's requests."""

    positions: Tensor  # [padded_tokens] int64, of all tokens of the step
    batch_rows: Tensor  # [n] int32
    starts: Tensor  # [n + 1] int32: where their tokens begin; only as many as ``query_lens`` says are computed
    query_lens: Tensor  # [n] int32; 0 for a row that does not run


@operation(writes=("kept", "out"))
def pool(
    hidden: Tensor,  # [padded_tokens, size]
    requests: PooledRequests,
    kinds: Tensor,  # [num_rows] int32: a PoolingKind, or 0 for requests that are not pooled
    prompt_len: Tensor,  # [num_rows] int32
    # written:
    # [num_rows, size] float32 or float64: sums of all states so far, their largest entries, or the first state
    kept: Tensor,
    out: Tensor,  # [n, size], as ``kept``: the vectors of requests whose prompt ends here; zeros for all others
) -> None:
    if runs_triton(hidden):
        _launch(hidden, requests, kinds, prompt_len, kept, out)
        return
    out.zero_()
    positions, starts = requests.positions, requests.starts
    columns = (requests.batch_rows.tolist(), starts[:-1].tolist(), requests.query_lens.tolist())
    for place, (row, start, count) in enumerate(zip(*columns, strict=True)):
        kind = int(kinds[row])
        if not kind or not count:
            continue
        own, position = hidden[start : start + count].to(kept.dtype), int(positions[start])
        if kind == PoolingKind.LAST:
            vector = own[-1]
        elif kind == PoolingKind.CLS:
            vector = own[0] if position == 0 else kept[row]
            kept[row] = vector
        elif kind == PoolingKind.MAX:
            largest = own.amax(0)
            vector = largest if position == 0 else torch.maximum(kept[row], largest)
            kept[row] = vector
        else:
            if kind == PoolingKind.WEIGHTED_MEAN:
                own = own * (positions[start : start + count] + 1).to(own.dtype).unsqueeze(1)
            total = own.sum(0) if position == 0 else kept[row] + own.sum(0)
            kept[row] = total
            vector = total / _divisor(kind, float(prompt_len[row]))
        if position + count == int(prompt_len[row]):
            out[place] = vector


def _divisor(kind: int, length: float) -> float:
    if kind == PoolingKind.WEIGHTED_MEAN:
        return length * (length + 1) / 2
    return length**0.5 if kind == PoolingKind.MEAN_SQRT_LEN else length


def _launch(
    hidden: Tensor,
    requests: PooledRequests,
    kinds: Tensor,
    prompt_len: Tensor,
    kept: Tensor,
    out: Tensor,
) -> None:
    assert hidden.stride(1) == kept.stride(1) == out.stride(1) == 1
    num_reqs, size = out.shape
    block = min(_MOST_COLUMNS, next_power_of_2(size))
    _pool_kernel[(num_reqs, -(-size // block))](
        hidden,
        requests.positions,
        requests.batch_rows,
        requests.starts,
        requests.query_lens,
        kinds,
        prompt_len,
        kept,
        out,
        hidden.stride(0),
        size,
        LAST=int(PoolingKind.LAST),
        CLS=int(PoolingKind.CLS),
        MAX=int(PoolingKind.MAX),
        SQRT=int(PoolingKind.MEAN_SQRT_LEN),
        WEIGHTED=int(PoolingKind.WEIGHTED_MEAN),
        TOKENS=_TOKENS,
        BLOCK=block,
        num_warps=4,
        **early_start(hidden),
    )


@jit_general("stride", "size")
def _pool_kernel(
    hidden,
    positions,
    batch_rows,
    starts,
    query_lens,
    kinds,
    prompt_len,
    kept,
    out,
    stride,
    size,
    LAST: tl.constexpr,
    CLS: tl.constexpr,
    MAX: tl.constexpr,
    SQRT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program for some columns of a request's vector; it goes over all of the request's tokens."""
    wait_for_last(EARLY)
    let_next_start(EARLY)
    place = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < size
    row = tl.load(batch_rows + place).to(tl.int64)
    kind, count = tl.load(kinds + row), tl.load(query_lens + place)
    start = tl.load(starts + place).to(tl.int64)
    runs = (kind != 0) & (count > 0)
    position = tl.load(positions + start, mask=runs, other=0)
    length = tl.load(prompt_len + row)

    goes_on = runs & (kind != LAST) & (position > 0)
    of_row = kept + row * size + column
    total = tl.load(of_row, mask=exists & goes_on, other=0.0)
    total = tl.where((kind == MAX) & (position == 0), float("-inf"), total)
    takes_all = runs & (kind != LAST) & (kind != CLS)
    num_summed = tl.where(takes_all, count, 0)
    for begin in range(0, num_summed, TOKENS):
        token = begin + tl.arange(0, TOKENS)
        places = hidden + (start + token)[:, None] * stride + column[None, :]
        tile = tl.load(places, mask=(token < num_summed)[:, None] & exists[None, :], other=0.0)
        tile = tile.to(kept.dtype.element_ty)
        there = tl.where((token < num_summed)[:, None], tile, float("-inf"))
        weight = tl.where(kind == WEIGHTED, (position + token + 1).to(kept.dtype.element_ty), 1.0)
        # Not a number stays one, which a maximum would drop.
        largest = tl.maximum(total, tl.max(there, 0)) + 0.0 * tl.sum(tile, 0)
        total = tl.where(kind == MAX, largest, total + tl.sum(tile * weight[:, None], 0))
    takes_one = runs & ((kind == LAST) | ((kind == CLS) & (position == 0)))
    at = start + tl.where(kind == LAST, count - 1, 0)
    one = tl.load(hidden + at * stride + column, mask=exists & takes_one, other=0.0).to(kept.dtype.element_ty)
    total = tl.where(takes_one, one, total)
    tl.store(of_row, total, mask=exists & runs & (kind != LAST))
    size_of = length.to(tl.float32)
    divisor = tl.where(kind == SQRT, tl.sqrt(size_of), tl.where(kind == WEIGHTED, size_of * (size_of + 1) / 2, size_of))
    vector = tl.where(takes_all & (kind != MAX), total / divisor, total)
    ends = runs & (position + count == length)
    tl.store(out + place * size + column, tl.where(ends, vector, 0.0), mask=exists)
