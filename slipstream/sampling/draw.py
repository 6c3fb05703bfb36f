"""The last step of every sampler: noise for rows that are not greedy, then the argmax, with ties to the lowest id.

A drafter may have only some of the target's tokens. Its noise is still keyed by the target's ids, so that with the
target's logits and the target's noise it draws the target's token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation
from slipstream.kernels.native.step import compiled, in_c
from slipstream.kernels.triton_jit import (
    arrival_counts,
    early_start,
    jit,
    let_next_start,
    next_power_of_2,
    runs_triton,
    tl,
    wait_for_last,
)
from slipstream.sampling.check_logits import find_maxima, without_bad_numbers
from slipstream.sampling.gumbel import TARGET_NOISE, gumbel_at, gumbel_block, gumbel_noise, gumbel_noise_at
from slipstream.sampling.temperature import LEAST_TEMPERATURE, divisor

_BLOCK = 2048


class DrawKeys(NamedTuple):
    """What a draw depends on besides the logits."""

    temperature: Tensor  # [num_rows] float32; rows at 0 are greedy
    seeds: Tensor  # [num_rows, 2] int32
    positions: Tensor  # [n] int32: of the token to draw
    choice: Tensor  # [num_rows] int32


class DrawnDrafts(NamedTuple):
    """Memory that drafts are written to."""

    draft_ids: Tensor  # [n] int32, may be strided: -1 where the row has NaN, +inf or nothing finite
    kept_logits: Tensor | None  # [num_rows, num_columns] float32: receives the unmodified logits, by row


@operation(lambda logits: (TensorSpec((logits.shape[0],), torch.int64), TensorSpec((logits.shape[0],), torch.bool)))
def draw_tokens(
    logits: Tensor,  # [n, num_columns]; NaN and +inf count as -inf
    batch_rows: Tensor,  # [n] int32
    keys: DrawKeys,
    noise: bool,  # without it all rows are greedy
    scaled: bool,  # the temperature is in the logits already
    purpose: int = TARGET_NOISE,
    target_ids: Tensor | None = None,  # [num_columns] int32: the tokens of the columns, ascending; None: 0, 1, 2, ...
) -> tuple[Tensor, Tensor]:  # [n] int64, always inside the vocabulary; [n] bool: NaN, +inf or nothing finite in the row
    if runs_triton(logits):
        token_ids = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
        failed = torch.empty(logits.shape[0], dtype=torch.bool, device=logits.device)
        _launch(logits, batch_rows, keys, noise, scaled, purpose, target_ids, _Results(token_ids, failed, None))
        return token_ids, failed
    _, columns, failed, any_failed = find_maxima(logits)
    if any_failed:
        logits = without_bad_numbers(logits)
        columns = find_maxima(logits).columns
    if noise:
        rows = batch_rows.long()
        own, key = keys.temperature[rows], (keys.seeds[rows], keys.positions, keys.choice[rows])
        if not scaled:
            logits = logits / divisor(own).unsqueeze(1)
        if target_ids is None:
            gumbel = gumbel_noise(*key, logits.shape[1], purpose)
        else:
            gumbel = gumbel_noise_at(*key, target_ids, purpose)
        columns = find_maxima(logits + torch.where((own > 0).unsqueeze(1), gumbel, 0.0)).columns
    return columns if target_ids is None else target_ids[columns].long(), failed


@operation(writes=("drafts",))
def draw_drafts(
    logits: Tensor,  # [n, num_columns]; NaN and +inf count as -inf
    batch_rows: Tensor,  # [n] int32
    keys: DrawKeys,
    noise: bool,  # without it all rows are greedy
    purpose: int,
    target_ids: Tensor | None,  # [num_columns] int32: the tokens of the columns, ascending; None: 0, 1, 2, ...
    drafts: DrawnDrafts,  # written
) -> None:
    """``draw_tokens`` for drafts, whose ids and logits are written to given memory."""
    if runs_triton(logits):
        results = _Results(drafts.draft_ids, None, drafts.kept_logits)
        _launch(logits, batch_rows, keys, noise, False, purpose, target_ids, results)
        return
    token_ids, failed = draw_tokens.body(logits, batch_rows, keys, noise, False, purpose, target_ids)
    drafts.draft_ids.copy_(token_ids.masked_fill(failed, -1))
    if (kept_logits := drafts.kept_logits) is not None:
        kept_logits.index_copy_(0, batch_rows.long(), logits.to(kept_logits.dtype))


@in_c(draw_drafts)
def _draw_in_c(
    logits: Tensor,
    batch_rows: Tensor,
    keys: DrawKeys,
    noise: bool,
    purpose: int,
    target_ids: Tensor | None,
    drafts: DrawnDrafts,
) -> None:
    is_plain = not noise and drafts.kept_logits is None and logits.dtype is torch.float32
    found = find_maxima(logits) if is_plain else None
    if found is None or found.any_failed:
        draw_drafts.body(logits, batch_rows, keys, noise, purpose, target_ids, drafts)
        return
    ids, out = None if target_ids is None else target_ids.data_ptr(), drafts.draft_ids
    arrays = (found.columns.data_ptr(), found.failed.data_ptr(), ids, out.data_ptr())
    compiled().slip_place_maxima(*arrays, out.stride(0), out.shape[0])


class _Results(NamedTuple):
    token_ids: Tensor  # [n], may be strided
    failed: Tensor | None  # [n] bool; None: the token of such a row is -1
    kept_logits: Tensor | None  # [num_rows, num_columns] float32


def _launch(
    logits: Tensor,
    batch_rows: Tensor,
    keys: DrawKeys,
    noise: bool,
    scaled: bool,
    purpose: int,
    target_ids: Tensor | None,
    results: _Results,
) -> None:
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    n, num_columns = logits.shape
    if n == 0:
        return
    num_blocks, kept = -(-num_columns // _BLOCK), results.kept_logits
    best_value = torch.empty(n, num_blocks, dtype=torch.float32, device=logits.device)
    best_column, state = torch.empty(2, n, num_blocks, dtype=torch.int32, device=logits.device)
    _draw_kernel[(n, num_blocks)](
        logits,
        batch_rows,
        tuple(keys),
        target_ids,
        (best_value, best_column, state, arrival_counts(logits.device, n)),
        tuple(results),
        logits.stride(0),
        results.token_ids.stride(0),
        0 if kept is None else kept.stride(0),
        num_columns,
        num_blocks,
        NOISE=noise,
        SCALED=scaled,
        HAS_IDS=target_ids is not None,
        SAYS_FAILED=results.failed is not None,
        KEEPS=kept is not None,
        PURPOSE=purpose,
        LEAST=LEAST_TEMPERATURE,
        BLOCK=_BLOCK,
        MERGED=next_power_of_2(num_blocks),
        num_warps=4,
        **early_start(logits),
    )


@jit
def _noise(
    row, own, column, keys, target_ids, num_columns, HAS_IDS: tl.constexpr, PURPOSE: tl.constexpr, BLOCK: tl.constexpr
):
    _, seeds, positions, choice = keys
    position, own_choice = tl.load(positions + row), tl.load(choice + own)
    if HAS_IDS:
        ids = tl.load(target_ids + column, mask=column < num_columns, other=0)
        return gumbel_at(seeds + 2 * own, position, own_choice, ids, PURPOSE)
    return gumbel_block(seeds + 2 * own, position, own_choice, tl.program_id(1) * BLOCK, PURPOSE, BLOCK)


@jit
def _draw_kernel(
    logits,
    batch_rows,
    keys,  # temperature, seeds, positions, choice
    target_ids,
    parts,  # best values, their columns, flags, and the number of finished blocks, for each row
    results,  # token ids, failed, kept logits
    stride,
    id_stride,
    kept_stride,
    num_columns,
    num_blocks,
    NOISE: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_IDS: tl.constexpr,
    SAYS_FAILED: tl.constexpr,
    KEEPS: tl.constexpr,
    PURPOSE: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
    MERGED: tl.constexpr,
    EARLY: tl.constexpr,
):
    best_value, best_column, state, counters = parts
    token_ids, failed, kept = results
    wait_for_last(EARLY)
    let_next_start(EARLY)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + column, mask=column < num_columns, other=float("-inf")).to(tl.float32)
    own = tl.load(batch_rows + row).to(tl.int64)
    if KEEPS:
        tl.store(kept + own * kept_stride + column, x, mask=column < num_columns)
    bad = (x != x) | (x == float("inf"))
    x = tl.where(bad, float("-inf"), x)
    # Two bits: an entry was NaN or +inf; an entry was finite.
    seen = 2 * tl.max(bad.to(tl.int32), 0) + tl.max((x > float("-inf")).to(tl.int32), 0)
    if NOISE:
        temperature = tl.load(keys[0] + own)
        if temperature > 0:
            if not SCALED:
                x = tl.div_rn(x, tl.zeros_like(x) + tl.maximum(temperature, LEAST))
            x += _noise(row, own, column, keys, target_ids, num_columns, HAS_IDS, PURPOSE, BLOCK)
    value, at = tl.max(x, 0, return_indices=True)

    base = row * num_blocks
    tl.store(best_value + base + block, value)
    tl.store(best_column + base + block, block * BLOCK + at)
    tl.store(state + base + block, seen)
    tl.debug_barrier()
    if tl.atomic_add(counters + row, 1, sem="acq_rel") == num_blocks - 1:
        # The last block of a row reduces the results of all; in order of blocks, so that the lowest id wins.
        other = tl.arange(0, MERGED)
        exists = other < num_blocks
        values = tl.load(best_value + base + other, mask=exists, other=float("-inf"), cache_modifier=".cg")
        states = tl.load(state + base + other, mask=exists, other=0, cache_modifier=".cg")
        _, winner = tl.max(values, 0, return_indices=True)
        token = tl.load(best_column + base + winner, cache_modifier=".cg")
        if HAS_IDS:
            token = tl.load(target_ids + token)
        fine = (tl.max(states & 1, 0) == 1) & (tl.max(states & 2, 0) == 0)
        if SAYS_FAILED:
            tl.store(failed + row, fine == 0)
        else:
            token = tl.where(fine, token, -1)
        tl.store(token_ids + row * id_stride, token.to(token_ids.dtype.element_ty))
        tl.store(counters + row, 0)
