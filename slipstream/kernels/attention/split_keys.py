"""The keys of a request, split among programs in chunks: which program has which, and how partial results are merged.

Chunk c belongs to program c modulo the number of programs. A program stores the largest score, the sum of weights and
the weighted values of each of its rows; the last program to finish merges them in the programs' order. Values are in
two halves, like rotated keys.
"""

from __future__ import annotations

from slipstream.kernels.triton_jit import jit, tl


@jit
def first_of(split, first_chunk, splits):
    """A program's first chunk, by absolute chunk number, so that it does not depend on the first chunk."""
    return first_chunk + (split - first_chunk % splits + splits) % splits


@jit
def store_whole(state, out, place, is_row, HALF: tl.constexpr, BLOCK_H: tl.constexpr):
    """The result of a program that has all keys; zero for rows without keys."""
    _, total, acc_low, acc_high = state
    h = tl.arange(0, BLOCK_H)
    exists = is_row[:, None] & (h < HALF)[None, :]
    divisor = tl.where(total == 0.0, 1.0, total)[:, None]
    to = out + place[:, None] + h[None, :]
    tl.store(to, (acc_low / divisor).to(out.dtype.element_ty), mask=exists)
    tl.store(to + HALF, (acc_high / divisor).to(out.dtype.element_ty), mask=exists)


@jit
def _part(partial, weight, row, there, HALF: tl.constexpr, BLOCK_D: tl.constexpr):
    """The partial result of one program for these rows."""
    d = tl.arange(0, BLOCK_D)
    peak = tl.load(weight + row * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
    mass = tl.load(weight + row * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
    kept = there[:, None] & (d < 2 * HALF)[None, :]
    values = tl.load(partial + row[:, None] * (2 * HALF) + d[None, :], mask=kept, other=0.0, cache_modifier=".cg")
    return peak, mass, values


@jit
def merged(state, part):
    """Two partial results of the same rows: largest score, sum of weights, weighted values."""
    largest, total, acc = state
    peak, mass, values = part
    higher = tl.maximum(largest, peak)
    anchor = tl.where(higher == float("-inf"), 0.0, higher)
    shrink, grow = tl.exp2(largest - anchor), tl.exp2(peak - anchor)
    return higher, total * shrink + mass * grow, acc * shrink[:, None] + values * grow[:, None]


@jit
def _join(
    partial,
    weight,
    first_row,  # of the first program's
    parts,
    out,
    place,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    AT_ONCE: tl.constexpr,  # 1, 2 or 4
):
    """Merge the partial results of a tile in the programs' order and store them. Several are loaded at once."""
    r, d = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    largest, total = tl.full([BLOCK_R], float("-inf"), tl.float32), tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for i in range(0, parts, AT_ONCE):
        is_row, row = r < ROWS, first_row + i * ROWS + r
        one = _part(partial, weight, row, is_row, HALF, BLOCK_D)
        if AT_ONCE > 1:
            two = _part(partial, weight, row + ROWS, is_row & (i + 1 < parts), HALF, BLOCK_D)
        if AT_ONCE > 2:
            three = _part(partial, weight, row + 2 * ROWS, is_row & (i + 2 < parts), HALF, BLOCK_D)
            four = _part(partial, weight, row + 3 * ROWS, is_row & (i + 3 < parts), HALF, BLOCK_D)
        largest, total, acc = merged((largest, total, acc), one)
        if AT_ONCE > 1:
            largest, total, acc = merged((largest, total, acc), two)
        if AT_ONCE > 2:
            largest, total, acc = merged((largest, total, acc), three)
            largest, total, acc = merged((largest, total, acc), four)
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
    parts,  # programs with a partial result, from the first on
    splits,  # maximum number of programs
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Store a partial result; the last program of a tile to do so merges them all."""
    largest, total, acc_low, acc_high = state
    out, partial, weight, arrivals = results
    m, h = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_H)
    is_low = (m < ROWS)[:, None] & (h < HALF)[None, :]
    first_row = pair * splits * ROWS
    mine = first_row + split * ROWS + m
    part = partial + mine[:, None] * (2 * HALF) + h[None, :]
    tl.store(part, acc_low, mask=is_low)
    tl.store(part + HALF, acc_high, mask=is_low)
    tl.store(weight + mine * 2, largest, mask=m < ROWS)
    tl.store(weight + mine * 2 + 1, total, mask=m < ROWS)
    tl.debug_barrier()
    if tl.atomic_add(arrivals + pair, 1, sem="acq_rel") == parts - 1:
        tl.store(arrivals + pair, 0)
        _join(partial, weight, first_row, parts, out, place, ROWS, HALF, 2 * BLOCK_H, BLOCK_R, AT_ONCE)
