"""The last step of every sampler: noise for the rows that want it, and the largest entry, lowest id on ties.

A drafter may know only some of the target's tokens. Its noise goes by the target's ids all the same, so that with the
target's logits and the target's noise it draws the target's token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation
from slipstream.kernels.triton_jit import arrival_counts, jit, next_power_of_2, runs_triton, tl
from slipstream.sampling.check_logits import row_max, without_bad_numbers
from slipstream.sampling.gumbel import TARGET_NOISE, gumbel_at, gumbel_block, gumbel_noise, gumbel_noise_at
from slipstream.sampling.temperature import LEAST_TEMPERATURE, divisor

_BLOCK = 2048


def _shape(
    logits: Tensor,
    batch_rows: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    choice: Tensor,
    noise: bool,
    scaled: bool,
    purpose: int = TARGET_NOISE,
    target_ids: Tensor | None = None,
) -> tuple[TensorSpec, TensorSpec]:
    return TensorSpec((logits.shape[0],), torch.int64), TensorSpec((logits.shape[0],), torch.bool)


@operation(_shape)
def draw_tokens(
    logits: Tensor,  # [n, num_columns]; NaN and +inf count as -inf
    batch_rows: Tensor,  # [n] int32
    temperature: Tensor,  # [num_rows] float32; rows at 0 are greedy
    seeds: Tensor,  # [num_rows, 2] int32
    positions: Tensor,  # [n] int32: where the token will stand
    choice: Tensor,  # [num_rows] int32
    noise: bool,  # without it all rows are greedy
    scaled: bool,  # the temperature is in the logits already
    purpose: int = TARGET_NOISE,
    target_ids: Tensor | None = None,  # [num_columns] int32: the tokens of the columns, ascending; None: 0, 1, 2, ...
) -> tuple[Tensor, Tensor]:  # [n] int64, always inside the vocabulary; [n] bool: NaN, +inf or nothing finite in the row
    if runs_triton(logits):
        return _launch(logits, batch_rows, temperature, seeds, positions, choice, noise, scaled, purpose, target_ids)
    largest, columns = row_max(logits)
    failed = ~torch.isfinite(largest)
    if bool(failed.any()):
        logits = without_bad_numbers(logits)
        columns = row_max(logits)[1]
    if noise:
        rows = batch_rows.long()
        own, key = temperature[rows], (seeds[rows], positions, choice[rows])
        if not scaled:
            logits = logits / divisor(own).unsqueeze(1)
        if target_ids is None:
            gumbel = gumbel_noise(*key, logits.shape[1], purpose)
        else:
            gumbel = gumbel_noise_at(*key, target_ids, purpose)
        columns = row_max(logits + torch.where((own > 0).unsqueeze(1), gumbel, 0.0))[1]
    return columns if target_ids is None else target_ids[columns].long(), failed


def _launch(
    logits: Tensor,
    batch_rows: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    choice: Tensor,
    noise: bool,
    scaled: bool,
    purpose: int,
    target_ids: Tensor | None,
) -> tuple[Tensor, Tensor]:
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    n, num_columns = logits.shape
    num_blocks = -(-num_columns // _BLOCK)
    best_value = torch.empty(n, num_blocks, dtype=torch.float32, device=logits.device)
    best_column, state = torch.empty(2, n, num_blocks, dtype=torch.int32, device=logits.device)
    token_ids = torch.empty(n, dtype=torch.int64, device=logits.device)
    failed = torch.empty(n, dtype=torch.bool, device=logits.device)
    if n == 0:
        return token_ids, failed
    _draw_kernel[(n, num_blocks)](
        logits,
        logits.stride(0),
        batch_rows,
        temperature,
        seeds,
        positions,
        choice,
        target_ids,
        best_value,
        best_column,
        state,
        arrival_counts(logits.device, n),
        token_ids,
        failed,
        num_columns,
        num_blocks,
        NOISE=noise,
        SCALED=scaled,
        HAS_IDS=target_ids is not None,
        PURPOSE=purpose,
        LEAST=LEAST_TEMPERATURE,
        BLOCK=_BLOCK,
        MERGED=next_power_of_2(num_blocks),
        num_warps=4,
    )
    return token_ids, failed


@jit
def _draw_kernel(
    logits,
    stride,
    batch_rows,
    temperature,
    seeds,
    positions,
    choice,
    target_ids,
    best_value,
    best_column,
    state,
    counters,
    token_ids,
    failed,
    num_columns,
    num_blocks,
    NOISE: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_IDS: tl.constexpr,
    PURPOSE: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
    MERGED: tl.constexpr,
):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + column, mask=column < num_columns, other=float("-inf")).to(tl.float32)
    bad = (x != x) | (x == float("inf"))
    x = tl.where(bad, float("-inf"), x)
    # Two bits: something that is no number, something finite.
    seen = 2 * tl.max(bad.to(tl.int32), 0) + tl.max((x > float("-inf")).to(tl.int32), 0)
    if NOISE:
        own = tl.load(batch_rows + row).to(tl.int64)
        own_temperature = tl.load(temperature + own)
        if own_temperature > 0:
            if not SCALED:
                x = tl.div_rn(x, tl.zeros_like(x) + tl.maximum(own_temperature, LEAST))
            position, own_choice = tl.load(positions + row), tl.load(choice + own)
            if HAS_IDS:
                ids = tl.load(target_ids + column, mask=column < num_columns, other=0)
                x += gumbel_at(seeds + 2 * own, position, own_choice, ids, PURPOSE)
            else:
                x += gumbel_block(seeds + 2 * own, position, own_choice, block * BLOCK, PURPOSE, BLOCK)
    value, at = tl.max(x, 0, return_indices=True)

    base = row * num_blocks
    tl.store(best_value + base + block, value)
    tl.store(best_column + base + block, block * BLOCK + at)
    tl.store(state + base + block, seen)
    tl.debug_barrier()
    if tl.atomic_add(counters + row, 1, sem="acq_rel") == num_blocks - 1:
        # All other blocks of the row have written theirs; in order of blocks the lowest id still wins.
        other = tl.arange(0, MERGED)
        exists = other < num_blocks
        values = tl.load(best_value + base + other, mask=exists, other=float("-inf"), cache_modifier=".cg")
        states = tl.load(state + base + other, mask=exists, other=0, cache_modifier=".cg")
        _, winner = tl.max(values, 0, return_indices=True)
        token = tl.load(best_column + base + winner, cache_modifier=".cg")
        if HAS_IDS:
            token = tl.load(target_ids + token)
        tl.store(token_ids + row, token.to(tl.int64))
        fine = (tl.max(states & 1, 0) == 1) & (tl.max(states & 2, 0) == 0)
        tl.store(failed + row, fine == 0)
        tl.store(counters + row, 0)
