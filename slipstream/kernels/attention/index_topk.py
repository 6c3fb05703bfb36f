"""The keys that a sparse indexer chooses for a token: those of the largest scores, exactly so many.

Of equal scores the lowest positions are taken, so the choice depends on the scores of a token alone. Float32 numbers,
read as integers with negative ones reversed, keep their order. The k-th largest is found from its leading eight bits to
its last: parts of a row are counted by programs of their own, and each pass begins with the counts of the one before.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation
from slipstream.kernels.attention.index_scores import IndexQueries, index_scores, write_scores
from slipstream.kernels.attention.token_keys import TokenKeys
from slipstream.kernels.triton_jit import jit, jit_general, next_power_of_2, runs_triton, tl

_WANTED_PROGRAMS = 1024
_MAX_PARTS = 32  # of a row
_BLOCK = 2048  # scores that a program has at once; less than 1 << 16
_SHIFTS = (24, 16, 8, 0)  # of the bits of each pass


class ChosenKeys(NamedTuple):
    """The slots that tokens attend to."""

    positions: Tensor  # [num_tokens, k] int32: ascending, -1 after the last
    counts: Tensor  # [num_tokens] int32: how many there are


def _top_shape(scores: Tensor, k: int) -> tuple[TensorSpec, TensorSpec]:
    num_tokens = scores.shape[0]
    return TensorSpec((num_tokens, k), torch.int32), TensorSpec((num_tokens,), torch.int32)


@operation(_top_shape)
def top_positions(
    scores: Tensor,  # [num_tokens, max_keys] float32; -inf is never chosen
    k: int,
) -> tuple[Tensor, Tensor]:  # as in ChosenKeys
    if runs_triton(scores):
        return _launch(scores, k, None)
    (num_tokens, max_keys), most = scores.shape, min(k, scores.shape[1])
    values, order = scores.sort(dim=1, descending=True, stable=True)
    is_chosen = values[:, :most] != float("-inf")
    chosen = torch.where(is_chosen, order[:, :most], max_keys).sort(dim=1).values
    positions = torch.full((num_tokens, k), -1, dtype=torch.int32)
    positions[:, :most] = torch.where(chosen < max_keys, chosen, -1)
    return positions, is_chosen.sum(1, dtype=torch.int32)


def _chosen_shape(queries: IndexQueries, k: int) -> tuple[TensorSpec, TensorSpec]:
    return _top_shape(queries.q, k)


@operation(_chosen_shape)
def choose_positions(
    queries: IndexQueries,
    keys: Tensor,  # [num_pages, page_size, dim]
    block_table: Tensor,  # [num_reqs, max_pages] int32
    token_keys: TokenKeys,  # of the same tokens
    max_keys: int,  # a bound on the end of what a token sees
    scale: float,
    k: int,
) -> tuple[Tensor, Tensor]:  # as in ChosenKeys
    if runs_triton(keys):
        # Much of this is neither written nor read: tokens that see at most k keys have them all.
        scores = torch.empty(queries.q.shape[0], max_keys, dtype=torch.float32, device=keys.device)
        write_scores(queries, keys, block_table, token_keys, scale, k, scores)
        return _launch(scores, k, token_keys)
    return top_positions.body(index_scores.body(queries, keys, block_table, token_keys, max_keys, scale), k)


def _launch(scores: Tensor, k: int, token_keys: TokenKeys | None) -> tuple[Tensor, Tensor]:
    (num_tokens, max_keys), device = scores.shape, scores.device
    assert scores.stride(1) == 1 and scores.dtype == torch.float32
    parts = min(-(-max_keys // _BLOCK), -(-_WANTED_PROGRAMS // max(1, num_tokens)), _MAX_PARTS)
    grid = (num_tokens, parts)
    # Two of them: a pass writes one while its programs read the other.
    counts = torch.empty(2, num_tokens, parts, 256, dtype=torch.int32, device=device)
    states = torch.empty(num_tokens, parts, 3, dtype=torch.int32, device=device)
    rows = (scores, scores.stride(0), max_keys, *((None, None) if token_keys is None else token_keys[1:]))
    options = {"RANGES": token_keys is not None, "BLOCK_P": next_power_of_2(parts), "BLOCK": _BLOCK}
    for idx, shift in enumerate(_SHIFTS):
        _count_kernel[grid](rows, counts[1 - idx % 2], counts[idx % 2], states, k, SHIFT=shift, **options, num_warps=8)
    positions = torch.empty(num_tokens, k, dtype=torch.int32, device=device)
    totals = torch.empty(num_tokens, dtype=torch.int32, device=device)
    last = counts[(len(_SHIFTS) - 1) % 2]
    _write_kernel[grid](rows, last, states, positions, totals, k, **options, num_warps=8)
    return positions, totals


@jit
def _ordered(x):
    """Integers in the order of these numbers. Both zeros are equal; what is no number is largest."""
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(x == 0.0, 0, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return tl.where(x == x, key, 0x7FFFFFFF)


@jit
def _range_of(rows, row, RANGES: tl.constexpr):
    """What is there of a row: all of it, or what a token sees."""
    begin, end = 0, rows[2]
    if RANGES:
        begin, end = tl.load(rows[3] + row), tl.minimum(tl.load(rows[4] + row), rows[2])
    return begin, end


@jit
def _part_of(begin, end, BLOCK: tl.constexpr):
    """A program's own part: whole blocks, as many as the others have."""
    size = tl.cdiv(tl.cdiv(end - begin, tl.num_programs(1)), BLOCK) * BLOCK
    first = begin + tl.program_id(1) * size
    return first, tl.minimum(first + size, end)


@jit
def _narrowed(counts, row, found, need, SHIFT: tl.constexpr, BLOCK_P: tl.constexpr):
    """The next bits of the number that is looked for, by what all parts counted, and how many of its equals are needed.

    With it, of each part: how many are larger and begin with the same bits up to there, and how many are equal.
    """
    part, digit = tl.arange(0, BLOCK_P)[:, None], tl.arange(0, 256)[None, :]
    num_parts = tl.num_programs(1)
    tile = tl.load(counts + (row * num_parts + part) * 256 + digit, mask=part < num_parts, other=0)
    here = tl.sum(tile, 0)
    from_here = tl.sum(here, 0) - tl.cumsum(here, 0) + here  # with this digit or a larger one
    need = tl.minimum(need, tl.sum(here, 0))
    chosen = tl.sum((from_here >= need).to(tl.int32), 0) - 1
    larger = tl.sum(tl.where(digit > chosen, tile, 0), 1)
    equal = tl.sum(tl.where(digit == chosen, tile, 0), 1)
    # The first digit has the sign.
    found = found | ((chosen - 128 if SHIFT == 24 else chosen) << SHIFT)
    return found, need - tl.sum(larger, 0), larger, equal


@jit_general("k")
def _count_kernel(
    rows,  # scores, the stride of rows, their size, and firsts and ends if a row has a range of its own
    before,  # [num_rows, num_parts, 256]: the counts of the last pass
    counts,  # of this one
    states,  # [num_rows, num_parts, 3]: the number so far, how many of its equals are needed, how many are larger
    k,
    SHIFT: tl.constexpr,
    RANGES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of numbers that begin as the one that is looked for: how many have which eight bits next."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin, end = _range_of(rows, row, RANGES)
    if RANGES & (end - begin <= k):
        return
    state = states + (row * tl.num_programs(1) + part) * 3
    found, need, num_larger = tl.zeros([], tl.int32), tl.zeros([], tl.int32) + k, tl.zeros([], tl.int32)
    if SHIFT < 24:
        found, need, num_larger = tl.load(state), tl.load(state + 1), tl.load(state + 2)
        found, need, larger, _ = _narrowed(before, row, found, need, SHIFT + 8, BLOCK_P)
        num_larger += tl.sum(tl.where(tl.arange(0, BLOCK_P) == part, larger, 0), 0)
    tl.store(state, found)
    tl.store(state + 1, need)
    tl.store(state + 2, num_larger)
    sums = tl.zeros([256], tl.int32)
    first, last = _part_of(begin, end, BLOCK)
    for start in range(first, last, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(rows[0] + row * rows[1] + column, mask=column < last, other=float("-inf"))
        key = _ordered(x)
        counted = x != float("-inf")
        digit = (key >> SHIFT) & 255
        if SHIFT < 24:
            counted = counted & (((key ^ found) >> (SHIFT + 8)) == 0)
        else:
            digit = digit ^ 128
        sums += tl.histogram(digit, 256, mask=counted)
    tl.store(counts + (row * tl.num_programs(1) + part) * 256 + tl.arange(0, 256), sums)


@jit_general("k")
def _write_kernel(
    rows,  # as above
    counts,  # of the last pass
    states,
    positions,
    totals,
    k,
    RANGES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What a part has of the chosen positions, at the places that come after those of the parts before."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin, end = _range_of(rows, row, RANGES)
    out = positions + row * k
    if RANGES & (end - begin <= k):
        if part == 0:
            for start in range(0, k, BLOCK):
                i = start + tl.arange(0, BLOCK)
                tl.store(out + i, tl.where(i < end - begin, begin + i, -1), mask=i < k)
            tl.store(totals + row, end - begin)
        return
    p = tl.arange(0, BLOCK_P)
    is_part = p < tl.num_programs(1)
    state = states + (row * tl.num_programs(1) + part) * 3
    found, need, larger, equal = _narrowed(counts, row, tl.load(state), tl.load(state + 1), 0, BLOCK_P)
    larger += tl.load(states + (row * tl.num_programs(1) + p) * 3 + 2, mask=is_part, other=0)
    if part == 0:
        total = tl.sum(larger, 0) + need
        tl.store(totals + row, total)
        for start in range(0, k, BLOCK):
            i = start + tl.arange(0, BLOCK)
            tl.store(out + i, tl.full([BLOCK], -1, tl.int32), mask=(i >= total) & (i < k))
    num_larger, num_equal = tl.sum(tl.where(p < part, larger, 0), 0), tl.sum(tl.where(p < part, equal, 0), 0)
    first, last = _part_of(begin, end, BLOCK)
    for start in range(first, last, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(rows[0] + row * rows[1] + column, mask=column < last, other=float("-inf"))
        key = _ordered(x)
        is_larger, is_equal = (x != float("-inf")) & (key > found), (x != float("-inf")) & (key == found)
        # Both are counted in one number, each in one half of its bits.
        both = is_larger.to(tl.int32) + (is_equal.to(tl.int32) << 16)
        earlier = tl.cumsum(both, 0) - both
        place, equals = num_larger + (earlier & 0xFFFF), num_equal + (earlier >> 16)
        chosen = is_larger | (is_equal & (equals < need))
        tl.store(out + place + tl.minimum(equals, need), column, mask=chosen)
        here = tl.sum(both, 0)
        num_larger += here & 0xFFFF
        num_equal += here >> 16
