"""The continuation of an earlier occurrence of a row's last tokens. Knows tokens only, no model."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation
from slipstream.kernels.triton_jit import arrival_counts, jit, next_power_of_2, runs_triton, tl
from slipstream.speculate.ngram_match import copied, latest_longest_match

LONGEST_MATCH, MOST_DRAFTS = 32, 16
# Programs that share the search of one row, and the positions each processes at a time.
_SHARES, _BLOCK = 8, 1024
# A match is one comparable number, its length in the high bits and its end in the low ones: 6 and 25 bits.
_END_BITS = 25


@operation(lambda batch_rows, k: TensorSpec((batch_rows.shape[0], k), torch.int32))
def find_continuation(
    batch_rows: Tensor,  # [n] int32; padding names the scratch row, whose num_tokens is 0
    token_ids: Tensor,  # [num_rows, max_len] int32; a row's tokens, followed by arbitrary values
    num_tokens: Tensor,  # [num_rows] int32
    max_drafts: Tensor,  # [num_rows] int32; 0: the row is not searched
    min_match: int,
    max_match: int,
    k: int,
) -> Tensor:  # [n, k] int32, -1 where nothing is proposed
    """The tokens after the longest earlier match of a row's end; of equally long ones the most recent.

    Lengths above ``max_match`` count as that. A copy that reaches the row's end continues with what it has copied.
    """
    if not 1 <= min_match <= max_match <= LONGEST_MATCH:
        raise ValueError(f"matches of {min_match} to {max_match} tokens: 1 to {LONGEST_MATCH} are possible")
    if not 1 <= k <= MOST_DRAFTS:
        raise ValueError(f"{k} drafts: 1 to {MOST_DRAFTS} are possible")
    if runs_triton(batch_rows):
        return _launch(batch_rows, token_ids, num_tokens, max_drafts, min_match, max_match, k)
    drafts = torch.full((batch_rows.shape[0], k), -1, dtype=torch.int32)
    rows = batch_rows.long()
    counts = max_drafts[rows].clamp(max=k).tolist()
    for i, (row, length, count) in enumerate(zip(rows.tolist(), num_tokens[rows].tolist(), counts, strict=True)):
        if count <= 0:
            continue
        tokens = token_ids[row, :length].numpy()
        end = latest_longest_match(tokens, min_match, max_match)
        if end is not None:
            drafts[i, :count] = torch.tensor(copied(tokens, end, count), dtype=torch.int32)
    return drafts


def _launch(
    batch_rows: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    max_drafts: Tensor,
    min_match: int,
    max_match: int,
    k: int,
) -> Tensor:
    assert token_ids.stride(1) == 1
    assert token_ids.shape[1] <= 1 << _END_BITS
    n = batch_rows.shape[0]
    drafts = torch.empty(n, k, dtype=torch.int32, device=batch_rows.device)
    if n == 0:
        return drafts
    best = torch.empty(n, _SHARES, dtype=torch.int32, device=batch_rows.device)
    _find_kernel[(n, _SHARES)](
        batch_rows,
        token_ids,
        token_ids.stride(0),
        num_tokens,
        max_drafts,
        best,
        arrival_counts(batch_rows.device, n),
        drafts,
        min_match,
        MAX_MATCH=max_match,
        K=k,
        WIDTH=next_power_of_2(k),
        SHARES=_SHARES,
        BLOCK=_BLOCK,
        END_BITS=_END_BITS,
        num_warps=4,
    )
    return drafts


@jit
def _find_kernel(
    batch_rows,
    token_ids,
    stride,
    num_tokens,
    max_drafts,
    best,
    counters,
    drafts,
    min_match,
    MAX_MATCH: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
    END_BITS: tl.constexpr,
):
    i, share = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(batch_rows + i).to(tl.int64)
    tokens = token_ids + row * stride
    allowed = tl.load(max_drafts + row)
    # Matches end before the last token. A row without drafts has no such position.
    last = tl.where(allowed > 0, tl.load(num_tokens + row) - 1, 0)

    found = tl.full([BLOCK], -1, tl.int32)
    for start in range(share * BLOCK, last, SHARES * BLOCK):
        end = start + tl.arange(0, BLOCK)
        alive = end < last
        matched = tl.zeros([BLOCK], tl.int32)
        for t in range(MAX_MATCH):
            alive = alive & (end >= t)
            # In a row shorter than the longest match no position is left by the time its beginning is read again.
            expected = tl.load(tokens + tl.maximum(last - t, 0))
            alive = alive & (tl.load(tokens + end - t, mask=alive, other=-1) == expected)
            matched += alive.to(tl.int32)
        found = tl.maximum(found, tl.where(matched >= min_match, (matched << END_BITS) + end, -1))

    tl.store(best + i * SHARES + share, tl.max(found, 0))
    tl.debug_barrier()
    if tl.atomic_add(counters + i, 1, sem="acq_rel") == SHARES - 1:
        # All other programs of the row have written their results.
        winner = tl.max(tl.load(best + i * SHARES + tl.arange(0, SHARES), cache_modifier=".cg"), 0)
        first = (winner & ((1 << END_BITS) - 1)) + 1
        slot = tl.arange(0, WIDTH)
        given = (winner >= 0) & (slot < allowed) & (slot < K)
        # A copy that reaches the end of the row wraps around; without a match there must be no division by zero.
        copied = first + slot % tl.maximum(last + 1 - first, 1)
        token = tl.load(tokens + copied, mask=given, other=-1)
        tl.store(drafts + i * K + slot, token, mask=slot < K)
        tl.store(counters + i, 0)
