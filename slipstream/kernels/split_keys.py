"""Keys of a request, shared out among programs in chunks: which are whose, and how what the programs leave is joined.

Chunk c belongs to program c modulo the number of programs. A program leaves the largest score, the sum of weights and
the weighted values of each of its rows; the last to arrive joins them in the programs' order. Values lie in two halves,
as the keys that were rotated do.
"""

from __future__ import annotations

from slipstream.kernels.triton_jit import jit, tl


@jit
def first_of(split, first_chunk, SPLITS: tl.constexpr):
    """A program's first chunk. By the chunk's own number: a first one that moves on moves none to another program."""
    return first_chunk + (split - first_chunk % SPLITS + SPLITS) % SPLITS


@jit
def store_whole(state, out, place, is_row, HALF: tl.constexpr, BLOCK_H: tl.constexpr):
    """The result of a program that has seen all keys; zero for rows that saw none."""
    _, total, acc_low, acc_high = state
    h = tl.arange(0, BLOCK_H)
    exists = is_row[:, None] & (h < HALF)[None, :]
    divisor = tl.where(total == 0.0, 1.0, total)[:, None]
    to = out + place[:, None] + h[None, :]
    tl.store(to, (acc_low / divisor).to(out.dtype.element_ty), mask=exists)
    tl.store(to + HALF, (acc_high / divisor).to(out.dtype.element_ty), mask=exists)


@jit
def _join(
    partial,
    weight,
    pair,
    first_chunk,
    last_chunk,
    out,
    place,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """What the programs of a tile have left, joined and stored."""
    r, d = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    s = tl.arange(0, SPLITS)
    # Programs whose first chunk is behind the last one have left nothing.
    there = (first_of(s, first_chunk, SPLITS) <= last_chunk)[:, None] & (r < ROWS)[None, :]
    row = (pair * SPLITS + s)[:, None] * ROWS + r[None, :]
    peaks = tl.load(weight + row * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
    masses = tl.load(weight + row * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
    largest = tl.max(peaks, 0)
    anchor = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(masses * tl.exp2(peaks - anchor[None, :]), 0)
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    # From chunk 0 on those that have left something are the first ones.
    end = SPLITS if first_chunk > 0 else tl.minimum(SPLITS, last_chunk + 1)
    for begin in range(0, end, AT_ONCE):
        few = begin + tl.arange(0, AT_ONCE)
        left = (first_of(few, first_chunk, SPLITS) <= last_chunk)[:, None] & (r < ROWS)[None, :]
        at = (pair * SPLITS + few)[:, None] * ROWS + r[None, :]
        peak = tl.load(weight + at * 2, mask=left, other=float("-inf"), cache_modifier=".cg")
        kept = left[:, :, None] & (d < 2 * HALF)[None, None, :]
        from_part = partial + at[:, :, None] * (2 * HALF) + d[None, None, :]
        part = tl.load(from_part, mask=kept, other=0.0, cache_modifier=".cg")
        acc += tl.sum(part * tl.exp2(peak - anchor[None, :])[:, :, None], 0)
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    exists = (r < ROWS)[:, None] & (d < 2 * HALF)[None, :]
    tl.store(out + place[:, None] + d[None, :], result.to(out.dtype.element_ty), mask=exists)


@jit
def hand_in(
    state,
    results,
    pair,
    place,
    split,
    first_chunk,
    last_chunk,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Leave a partial result; the program that is the last of its tile to do so joins them all."""
    largest, total, acc_low, acc_high = state
    out, partial, weight, arrivals = results
    m, h = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_H)
    is_low = (m < ROWS)[:, None] & (h < HALF)[None, :]
    mine = (pair * SPLITS + split) * ROWS + m
    part = partial + mine[:, None] * (2 * HALF) + h[None, :]
    tl.store(part, acc_low, mask=is_low)
    tl.store(part + HALF, acc_high, mask=is_low)
    tl.store(weight + mine * 2, largest, mask=m < ROWS)
    tl.store(weight + mine * 2 + 1, total, mask=m < ROWS)
    tl.debug_barrier()
    parts = tl.minimum(SPLITS, last_chunk - first_chunk + 1)
    if tl.atomic_add(arrivals + pair, 1, sem="acq_rel") == parts - 1:
        tl.store(arrivals + pair, 0)
        _join(
            *(partial, weight, pair, first_chunk, last_chunk, out, place),
            *(ROWS, HALF, 2 * BLOCK_H, BLOCK_R, SPLITS, AT_ONCE),
        )
