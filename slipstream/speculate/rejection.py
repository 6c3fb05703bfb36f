"""Rejection sampling: drafts are accepted or replaced so that the result has the target's distribution.

A draft x is accepted with probability min(1, target(x) / draft(x)). Otherwise it is replaced by a sample of the
residual distribution max(target - draft, 0), normalised.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.device.operation import TensorSpec, operation
from slipstream.kernels.triton_jit import jit, runs_triton, tl
from slipstream.sampling.check_logits import find_maxima
from slipstream.sampling.draw import DrawKeys
from slipstream.sampling.gumbel import TARGET_NOISE, gumbel_block, gumbel_noise
from slipstream.sampling.philox import MASK, philox
from slipstream.sampling.temperature import LEAST_TEMPERATURE, divisor

# Three draws at one position need independent noise. Sharing it between drafter and residual biases the output: given
# that the draft was rejected its noise is no longer fresh. Total variation was then off by 0.02 to 0.04.
DRAFT_NOISE = 1
ACCEPT_NOISE = 2
RESIDUAL_NOISE = 3

_BLOCK = 4096
_NUM_WARPS = 16


class DrawnFrom(NamedTuple):
    """The distribution that drafts were sampled from, for speculative sampling."""

    draft_logits: Tensor  # [num_rows, k, draft_vocab] float32, without temperature
    # [vocab] int32: the column of each target token; -1: none. None: the columns are the first tokens.
    draft_columns: Tensor | None = None


class DraftTokens(NamedTuple):
    """The drafts that the target's logits are compared with."""

    draft_ids: Tensor  # [n] int32: the draft for the position that the logits are for; -1 if there is none
    logit_rows: Tensor  # [n] int32
    draft_idx: Tensor  # [n] int32: its index among the row's drafts; arbitrary if there is none


@operation(lambda logits: (TensorSpec((logits.shape[0],), torch.bool), TensorSpec((logits.shape[0],), torch.int64)))
def judge_drafts(
    logits: Tensor,  # [n, vocab]: the target's after temperature; -inf: banned; no NaN or +inf
    drafts: DraftTokens,
    keys: DrawKeys,
    drawn_from: DrawnFrom | None,  # None: the drafter is deterministic
) -> tuple[Tensor, Tensor]:  # [n] bool: the draft is accepted; [n] int64: the replacement, inside the vocabulary
    if runs_triton(logits):
        return _launch(logits, drafts, keys, drawn_from)
    _, token_ids, failed, _ = find_maxima(logits)
    accepted = (drafts.draft_ids == token_ids) & ~failed
    rows = drafts.logit_rows.long()
    sampled, drafted = keys.temperature[rows] > 0, drafts.draft_ids >= 0
    seeds, positions, choice = keys.seeds[rows], keys.positions, keys.choice[rows]

    # Without a draft this equals the draw of a step without speculation.
    plain = sampled & ~drafted
    noise = gumbel_noise(seeds[plain], positions[plain], choice[plain], logits.shape[1])
    token_ids[plain] = find_maxima(logits[plain] + noise).columns

    judged = sampled & drafted
    at, ids, key = rows[judged], drafts.draft_ids[judged], (seeds[judged], positions[judged], choice[judged])
    if drawn_from is None:
        draft_log_probs = _one_hot(ids, logits)
    else:
        draft_logits = drawn_from.draft_logits[at, drafts.draft_idx[judged].long()]
        draft_log_probs = _draft_log_probs(draft_logits, keys.temperature[at], logits, drawn_from.draft_columns)
    accepted[judged], token_ids[judged] = _judge(logits[judged], ids, draft_log_probs, key)
    return accepted, token_ids


def _at_least_float32(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _one_hot(draft_ids: Tensor, logits: Tensor) -> Tensor:
    """Log probabilities of a deterministic drafter."""
    is_draft = torch.arange(logits.shape[1], device=logits.device) == draft_ids.unsqueeze(1)
    return torch.where(is_draft, 0.0, -torch.inf).to(_at_least_float32(logits))


def _draft_log_probs(
    draft_logits: Tensor,  # [n, draft_vocab]
    temperature: Tensor,  # [n] float32
    logits: Tensor,  # [n, vocab]
    draft_columns: Tensor | None,  # [vocab] int32
) -> Tensor:  # [n, vocab]
    """Over the target's whole vocabulary. NaN in draft logits makes the whole row NaN."""
    scaled = draft_logits.to(_at_least_float32(logits)) / divisor(temperature).unsqueeze(1)
    if draft_columns is not None:
        known = scaled.log_softmax(1)
        # The last column is for tokens without one. If all others are NaN it is NaN too: tokens outside the vocabulary
        # of a broken drafter must not form a residual.
        unknown = known[:, :1] - torch.inf
        return torch.cat([known, unknown], 1)[:, draft_columns.long()]
    missing = max(0, logits.shape[1] - scaled.shape[1])
    return F.pad(scaled, (0, missing), value=-torch.inf).log_softmax(1)[:, : logits.shape[1]]


def _judge(
    logits: Tensor,  # [n, vocab]
    draft_ids: Tensor,  # [n] int32
    draft_log_probs: Tensor,  # [n, vocab]
    key: tuple[Tensor, Tensor, Tensor],  # seeds, positions and choice
) -> tuple[Tensor, Tensor]:
    # In logarithms, because probabilities underflow where their ratios still matter. NaN compares as false: the drafts
    # of a broken drafter are rejected, there is no residual, and the token comes from the target alone.
    target_log_probs = logits.log_softmax(1, dtype=_at_least_float32(logits))
    gap = draft_log_probs - target_log_probs
    # A draft from outside the target's vocabulary is rejected.
    of_draft = gap.gather(1, draft_ids.long().clamp(max=logits.shape[1] - 1).unsqueeze(1)).squeeze(1)
    accepted = (_uniform(*key) * of_draft.exp() < 1.0) & (draft_ids < logits.shape[1])

    noise = gumbel_noise(*key, logits.shape[1], RESIDUAL_NOISE)
    residual = torch.where(gap < 0, target_log_probs + gap.expm1().neg_().log_(), -torch.inf)
    _, token_ids, empty, _ = find_maxima(residual + noise)
    token_ids[empty] = find_maxima(logits[empty] + noise[empty]).columns
    return accepted, token_ids


def _uniform(
    seeds: Tensor,  # [n, 2] int32
    positions: Tensor,  # [n] int32
    choice: Tensor,  # [n] int32
) -> Tensor:  # [n] float32, above 0 and below 1
    """The first word of the Philox block with counter (0, position, ACCEPT_NOISE, choice)."""
    position = positions.long() & MASK
    zero = torch.zeros_like(position)
    low, high = (seeds.long() & MASK).unbind(1)
    bits = philox((zero, position, zero + ACCEPT_NOISE, choice.long()), (low, high))[0]
    return ((bits + 0.5) * 2.0**-32).float().clamp_(max=1.0 - 2.0**-24)


def _launch(logits: Tensor, drafts: DraftTokens, keys: DrawKeys, drawn_from: DrawnFrom | None) -> tuple[Tensor, Tensor]:
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    n, vocab_size = logits.shape
    accepted = torch.empty(n, dtype=torch.bool, device=logits.device)
    token_ids = torch.empty(n, dtype=torch.int64, device=logits.device)
    if n == 0:
        return accepted, token_ids
    draft_logits, columns = (None, None) if drawn_from is None else drawn_from
    if draft_logits is not None and draft_logits.stride(2) != 1:
        draft_logits = draft_logits.contiguous()
    row_stride, idx_stride, _ = (0, 0, 0) if draft_logits is None else draft_logits.stride()
    _judge_kernel[(n,)](
        logits,
        logits.stride(0),
        drafts.draft_ids,
        drafts.logit_rows,
        drafts.draft_idx,
        draft_logits,
        row_stride,
        idx_stride,
        columns,
        keys.temperature,
        keys.seeds,
        keys.positions,
        keys.choice,
        accepted,
        token_ids,
        vocab_size,
        0 if draft_logits is None else draft_logits.shape[2],
        HAS_DRAFT_LOGITS=draft_logits is not None,
        HAS_COLUMNS=columns is not None,
        LEAST=LEAST_TEMPERATURE,
        TARGET=TARGET_NOISE,
        ACCEPT=ACCEPT_NOISE,
        RESIDUAL=RESIDUAL_NOISE,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
    )
    return accepted, token_ids


@jit
def _judge_kernel(
    logits,
    stride,
    draft_ids,
    logit_rows,
    draft_idx,
    draft_logits,
    row_stride,
    idx_stride,
    draft_columns,
    temperature,
    seeds,
    positions,
    choice,
    accepted,
    token_ids,
    vocab_size,
    draft_vocab_size,
    HAS_DRAFT_LOGITS: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    LEAST: tl.constexpr,
    TARGET: tl.constexpr,
    ACCEPT: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row of logits."""
    i = tl.program_id(0).to(tl.int64)
    own = tl.load(logit_rows + i).to(tl.int64)
    draft, own_temperature = tl.load(draft_ids + i), tl.load(temperature + own)
    position, own_choice = tl.load(positions + i), tl.load(choice + own)
    values, seeds = logits + i * stride, seeds + 2 * own
    drafted = draft >= 0
    if own_temperature > 0:
        if drafted:
            source, scale = values, 1.0
            if HAS_DRAFT_LOGITS:
                source = draft_logits + own * row_stride + tl.load(draft_idx + i).to(tl.int64) * idx_stride
                scale = tl.maximum(own_temperature, LEAST)
            stays, token = _judge_row(
                values,
                vocab_size,
                source,
                draft_vocab_size,
                draft_columns,
                scale,
                draft,
                seeds,
                position,
                own_choice,
                HAS_DRAFT_LOGITS,
                HAS_COLUMNS,
                ACCEPT,
                RESIDUAL,
                BLOCK,
            )
        else:
            stays = drafted
            _, token = _best_logit(values, vocab_size, seeds, position, own_choice, True, TARGET, BLOCK)
    else:
        best, token = _best_logit(values, vocab_size, seeds, position, own_choice, False, TARGET, BLOCK)
        stays = (draft == token) & (best > float("-inf"))
    tl.store(accepted + i, stays)
    tl.store(token_ids + i, token.to(tl.int64))


@jit
def _judge_row(
    values,
    size,
    source,
    draft_size,
    columns,
    scale,
    draft,
    seeds,
    position,
    choice,
    HAS_DRAFT_LOGITS: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    ACCEPT: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    top, log_sum = _log_sum(values, size, 1.0, False, BLOCK)
    draft_top, draft_log_sum, of_draft = top, log_sum, 0.0
    if HAS_DRAFT_LOGITS:
        draft_top, draft_log_sum = _log_sum(source, draft_size, scale, True, BLOCK)
        of_draft = _draft_logit(source, draft_size, columns, draft, size, scale, HAS_COLUMNS)
        of_draft = of_draft - draft_top - draft_log_sum
    gap = of_draft - (_scaled(values, draft, size, 1.0, False) - top - log_sum)
    stays = _uniform_number(seeds, position, choice, ACCEPT) * tl.exp(gap) < 1.0

    bests, starts = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        target_log_probs = _scaled(values, token, size, 1.0, False) - top - log_sum
        if HAS_DRAFT_LOGITS:
            of_token = _draft_logit(source, draft_size, columns, token, size, scale, HAS_COLUMNS)
            gaps = of_token - draft_top - draft_log_sum - target_log_probs
            residual = target_log_probs + tl.log(1.0 - tl.exp(gaps))
            residual = tl.where(gaps < 0, residual, float("-inf"))
        else:
            residual = tl.where(token == draft, float("-inf"), target_log_probs)
        residual += gumbel_block(seeds, position, choice, start, RESIDUAL, BLOCK)
        starts = tl.where(residual > bests, start, starts)
        bests = tl.where(residual > bests, residual, bests)
    best, winner = _first_best(bests, starts, BLOCK)
    if best == float("-inf"):
        best, winner = _best_logit(values, size, seeds, position, choice, True, RESIDUAL, BLOCK)
    return stays, winner


@jit
def _draft_logit(source, draft_size, columns, token, size, scale, HAS_COLUMNS: tl.constexpr):
    """-inf for tokens outside the drafter's vocabulary."""
    column = token
    if HAS_COLUMNS:
        column = tl.load(columns + token, mask=token < size, other=-1)
        column = tl.where(column < 0, draft_size, column)
    return _scaled(source, column, draft_size, scale, True)


@jit
def _scaled(values, column, size, scale, DIVIDE: tl.constexpr):
    x = tl.load(values + column, mask=column < size, other=float("-inf")).to(tl.float32)
    return tl.div_rn(x, tl.zeros_like(x) + scale) if DIVIDE else x


@jit
def _log_sum(values, size, scale, DIVIDE: tl.constexpr, BLOCK: tl.constexpr):
    """The largest number of a row, and the logarithm of the sum of exp(x - largest), in one pass."""
    tops, sums = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        x = _scaled(values, start + tl.arange(0, BLOCK), size, scale, DIVIDE)
        before, tops = tops, tl.maximum(tops, x)
        # A row of only -inf is measured from 0, because -inf minus itself is NaN.
        base = tl.where(tops == float("-inf"), 0.0, tops)
        sums = sums * tl.exp(before - base) + tl.exp(x - base)
    top = tl.max(tops, 0)
    return top, tl.log(tl.sum(sums * tl.exp(tops - tl.where(top == float("-inf"), 0.0, top)), 0))


@jit
def _best_logit(values, size, seeds, position, choice, NOISE: tl.constexpr, PURPOSE: tl.constexpr, BLOCK: tl.constexpr):
    bests, starts = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, BLOCK):
        x = _scaled(values, start + tl.arange(0, BLOCK), size, 1.0, False)
        if NOISE:
            x += gumbel_block(seeds, position, choice, start, PURPOSE, BLOCK)
        starts = tl.where(x > bests, start, starts)
        bests = tl.where(x > bests, x, bests)
    return _first_best(bests, starts, BLOCK)


@jit
def _first_best(bests, starts, BLOCK: tl.constexpr):
    """The best of all lanes and its lowest id, which is 0 where all are -inf."""
    best = tl.max(bests, 0)
    return best, tl.min(tl.where(bests == best, starts + tl.arange(0, BLOCK), 2147483647), 0)


@jit
def _uniform_number(seeds, position, choice, PURPOSE: tl.constexpr):
    low = tl.load(seeds).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(seeds + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    bits, _, _, _ = tl.philox((high << 32) | low, tl.zeros_like(position), position, PURPOSE, choice)
    return tl.minimum((bits.to(tl.float32) + 0.5) * (1.0 / 4294967296.0), 1.0 - 1.0 / 16777216.0)
