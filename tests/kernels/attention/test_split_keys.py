from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from slipstream.kernels import triton_jit
from slipstream.kernels.attention.split_keys import first_of, hand_in
from slipstream.kernels.triton_jit import jit, tl
from tests.kernels.triton_check import poisoned_allocations, quietly_interpreted

pytestmark = pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")

ROWS, HALF, KEYS = 3, 6, 5  # of a tile, of a value, of a chunk
BLOCK_ROWS, BLOCK_HALF = 16, 16


@jit
def _first_chunks(out, first_chunk, splits: tl.constexpr):
    split = tl.arange(0, splits)
    tl.store(out + split, first_of(split, first_chunk, splits))


@jit
def _hand_in_all(peaks, totals, sums, results, parts, splits, at_once: tl.constexpr):
    """Each program with what it would have come to; ``sums`` are [splits, 2, 16, 16], of both halves of the values."""
    split, pair = tl.program_id(0), tl.program_id(1)
    if split >= parts:
        return
    m, h = tl.arange(0, 16), tl.arange(0, 16)
    low = sums + split * 512 + m[:, None] * 16 + h[None, :]
    state = (tl.load(peaks + split * 16 + m), tl.load(totals + split * 16 + m), tl.load(low), tl.load(low + 256))
    offset = (pair * 3 + tl.arange(0, 4)) * 12
    hand_in(state, results, pair, offset, split, parts, splits, 3, 6, 16, 16, 4, at_once)


@pytest.mark.parametrize("splits", [1, 4, 16])
def test_a_chunk_belongs_to_one_program_wherever_the_first_is(splits: int) -> None:
    for first_chunk in range(2 * splits + 1):
        out = torch.zeros(splits, dtype=torch.int32)
        with quietly_interpreted():
            _first_chunks[(1,)](out, first_chunk, splits)
        assert sorted(out.tolist()) == list(range(first_chunk, first_chunk + splits))
        assert [chunk % splits for chunk in out.tolist()] == list(range(splits))


def _partial(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Largest score, sum of weights and weighted values of each row; powers of two, as in the kernels."""
    largest = scores.amax(1)
    weights = torch.exp2(scores - torch.where(largest == -math.inf, 0.0, largest).unsqueeze(1))
    return largest, weights.sum(1), weights @ values


@pytest.mark.parametrize(("first_chunk", "last_chunk"), [(0, 1), (0, 30), (3, 4), (3, 9), (6, 8), (13, 60)])
@pytest.mark.parametrize(("splits", "at_once"), [(8, 1), (8, 2), (8, 4), (16, 4)])
def test_parts_are_joined_as_if_one_program_had_seen_all(
    first_chunk: int, last_chunk: int, splits: int, at_once: int
) -> None:
    torch.manual_seed(first_chunk + last_chunk)
    num_keys = (last_chunk + 1 - first_chunk) * KEYS
    scores, values = 8 * torch.randn(ROWS, num_keys).double(), torch.randn(num_keys, 2 * HALF).double()
    scores[1] = -math.inf  # a row that sees nothing
    scores[2, KEYS:] = -math.inf  # and one that sees nothing but the first chunk
    peaks, totals = torch.full((splits, BLOCK_ROWS), torch.nan), torch.full((splits, BLOCK_ROWS), torch.nan)
    sums = torch.full((splits, 2, BLOCK_ROWS, BLOCK_HALF), torch.nan)
    parts = min(splits, last_chunk + 1 - first_chunk)
    owner = torch.arange(first_chunk, last_chunk + 1).repeat_interleave(KEYS) % parts
    for split in owner.unique().tolist():
        left = _partial(scores[:, owner == split], values[owner == split])
        peaks[split, :ROWS], totals[split, :ROWS] = left[0], left[1]
        sums[split, :, :ROWS, :HALF] = left[2].view(ROWS, 2, HALF).transpose(0, 1)
    with quietly_interpreted(), poisoned_allocations():
        out, arrivals = torch.empty(2, ROWS, 2 * HALF), torch.zeros(2, dtype=torch.int32)
        partial, weight = torch.empty(2, splits, ROWS, 2 * HALF), torch.empty(2, splits, ROWS, 2)
        results = (out, partial, weight, arrivals)
        _hand_in_all[(splits, 2)](peaks, totals, sums, results, parts, splits, at_once)
    expected = torch.softmax(scores * math.log(2), dim=1).nan_to_num(0.0) @ values
    torch.testing.assert_close(out.double(), expected.expand(2, -1, -1), rtol=1e-5, atol=1e-5)
    assert not arrivals.any(), "the next launch counts from zero"
