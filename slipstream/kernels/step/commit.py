"""The end of a step on the device: rows take their new tokens, advance, and stop themselves."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.device.operation import operation
from slipstream.kernels.native.step import NewTokensRecord, batch_record, compiled, in_c, record, rows_record
from slipstream.kernels.request_rows import RowState
from slipstream.kernels.step.prepare_inputs import BatchLayout
from slipstream.kernels.triton_jit import (
    early_start,
    jit,
    let_next_start,
    next_power_of_2,
    runs_triton,
    tl,
    wait_for_last,
)
from slipstream.plan import RowStatus

# Columns of a result before its tokens: status, verified drafts, accepted drafts, and whether an unverified draft would
# have been accepted, from which the host learns the value of drafts at little cost.
NUM_HEADER_COLUMNS = 4
NUM_ACCEPTED_COLUMN = 2


class CheckedTokens(NamedTuple):
    """The result of verifying a step's drafts."""

    new_ids: Tensor  # [padded_reqs, at most k + 1] int: accepted drafts, then the target's own token
    num_accepted: Tensor  # [padded_reqs] int32
    failed: Tensor  # [padded_reqs] bool: the logits after the accepted drafts held no usable number
    # [padded_logits] bool, of unverified drafts; None: accepted are those that equal the new token.
    would_be_accepted: Tensor | None = None


@operation(
    writes=(
        "rows.token_ids",
        "rows.num_computed",
        "rows.num_tokens",
        "rows.num_drafts",
        "rows.status",
        "rows.step_start",
        "out",
    )
)
def commit(
    checked: CheckedTokens,
    rows: RowState,  # written in part; the old drafts are removed
    batch: BatchLayout,
    query_lens: Tensor,  # [padded_reqs] int32: tokens that are not padding
    out: Tensor,  # written: [padded_reqs, NUM_HEADER_COLUMNS + k + 1] int32; tokens that are none are -1
) -> None:
    if runs_triton(batch.batch_rows):
        _launch(checked, rows, batch, query_lens, out)
        return
    new_ids, own, status = checked.new_ids, batch.batch_rows.long(), rows.status
    runs = (status[own] == RowStatus.RUNNING) & (query_lens > 0)
    num_logits = batch.logit_start_loc.diff()
    known = batch.query_start_loc.diff() - num_logits + 1
    length, limit, num_computed = rows.num_tokens[own], rows.max_total[own], rows.num_computed
    # A prompt chunk that ends before the last known token samples nothing.
    draws = runs & (num_computed[own] + known == length)
    idx = torch.arange(new_ids.shape[1])
    count, stopped, fails = _count_new(checked, rows.stop_ids[own], limit - length)
    takes = draws & ~fails
    count = torch.where(takes, count, 0)
    written = idx < count.unsqueeze(1)
    slots = (length.unsqueeze(1) + idx).clamp(max=rows.token_ids.shape[1] - 1).long()
    # For a draft that is about to be overwritten.
    unchecked = takes & (num_logits == 1) & (rows.num_drafts[own] > 0)
    is_same = rows.token_ids[own, slots[:, 0]] == new_ids[:, 0]
    would_be_accepted = unchecked & _first(checked.would_be_accepted, batch.logit_start_loc, otherwise=is_same)
    for j in idx.tolist():
        here = rows.token_ids[own, slots[:, j]]
        rows.token_ids[own, slots[:, j]] = torch.where(written[:, j], new_ids[:, j].int(), here)
    after = status[own]
    after = torch.where(takes & (length + count >= limit), int(RowStatus.LENGTH), after)
    after = torch.where(takes & stopped, int(RowStatus.STOPPED), after)
    after = torch.where(draws & fails, int(RowStatus.ERROR), after)
    num_checked = torch.where(draws, query_lens - known, 0)
    computed = num_computed[own] + torch.where(runs, known + (count - 1).clamp(min=0), 0)
    rows.step_start[own] = torch.where(runs, num_computed[own] + 1, 0)
    num_computed[own] = computed
    rows.num_tokens[own] = length + count
    rows.num_drafts[own] = torch.where(runs, 0, rows.num_drafts[own])
    status[own] = after
    out[:, 0], out[:, 1] = after, num_checked
    out[:, NUM_ACCEPTED_COLUMN] = torch.where(takes, torch.minimum(checked.num_accepted, count), 0)
    out[:, 3] = would_be_accepted
    out[:, NUM_HEADER_COLUMNS:] = -1
    out[:, NUM_HEADER_COLUMNS : NUM_HEADER_COLUMNS + len(idx)] = torch.where(written, new_ids.int(), -1)


@in_c(commit)
def _commit_in_c(checked: CheckedTokens, rows: RowState, batch: BatchLayout, query_lens: Tensor, out: Tensor) -> None:
    new_ids, columns = checked.new_ids.contiguous(), out.shape[1] - NUM_HEADER_COLUMNS
    sizes = (new_ids.shape[1], new_ids.dtype is torch.int64, columns)
    new = record(NewTokensRecord, new_ids, *checked[1:], query_lens, out, *sizes)
    compiled().slip_commit(rows_record(rows), batch_record(*batch), new)


def _launch(checked: CheckedTokens, rows: RowState, batch: BatchLayout, query_lens: Tensor, out: Tensor) -> None:
    forced = checked.would_be_accepted
    num_stop_ids, width = rows.stop_ids.shape[1], out.shape[1] - NUM_HEADER_COLUMNS
    _commit_kernel[(batch.batch_rows.shape[0],)](
        checked.new_ids,
        checked.num_accepted,
        checked.failed,
        checked.failed if forced is None else forced,
        batch.batch_rows,
        batch.query_start_loc,
        batch.logit_start_loc,
        query_lens,
        rows.stop_ids,
        rows.max_total,
        rows.token_ids,
        rows.num_computed,
        rows.num_tokens,
        rows.num_drafts,
        rows.status,
        rows.step_start,
        out,
        (rows.token_ids.stride(0), num_stop_ids, checked.new_ids.shape[1], width),
        RUNNING=int(RowStatus.RUNNING),
        STOPPED=int(RowStatus.STOPPED),
        LENGTH=int(RowStatus.LENGTH),
        ERROR=int(RowStatus.ERROR),
        HEADER=NUM_HEADER_COLUMNS,
        MATCH=forced is None,
        STOPS=next_power_of_2(num_stop_ids),
        WIDTH=next_power_of_2(width),
        num_warps=1,
        **early_start(batch.batch_rows),
    )


def _first(of_logits: Tensor | None, logit_start_loc: Tensor, otherwise: Tensor) -> Tensor:
    """The entry at the first logit of each request; padding has no logits."""
    if of_logits is None:
        return otherwise
    return of_logits[logit_start_loc[:-1].clamp(max=of_logits.shape[0] - 1).long()]


def _count_new(checked: CheckedTokens, stop_ids: Tensor, room: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Accepted drafts and the target's own token, if any; whether a stop ends them; whether they are invalid."""
    new_ids, failed = checked.new_ids, checked.failed
    count = torch.minimum(checked.num_accepted + (~failed).int(), room)
    idx = torch.arange(new_ids.shape[1])
    ends = (stop_ids.unsqueeze(1) == new_ids.unsqueeze(2)).any(2) & (idx < count.unsqueeze(1))
    stopped = ends.any(1)
    # Tokens after a stop are dropped, so whether they failed does not matter.
    return torch.where(stopped, ends.int().argmax(1) + 1, count).int(), stopped, failed & ~stopped


@jit
def _first_stop(ids, idx, count, stop_ids, num_stop_ids, STOPS: tl.constexpr, WIDTH: tl.constexpr):
    """The first new token that ends its request; beyond all of them if none does."""
    slot = tl.arange(0, STOPS)
    stops = tl.load(stop_ids + slot, mask=slot < num_stop_ids, other=-1)
    ends = tl.sum((ids[:, None] == stops[None, :]).to(tl.int32), 1) > 0
    return tl.min(tl.where(ends & (idx < count), idx, WIDTH), 0)


@jit
def _would_be_accepted(is_there, pointers, ids, idx, forced, start, MATCH: tl.constexpr):
    """Whether the first draft is the first new token, or what is forced."""
    if MATCH:
        draft = tl.load(pointers, mask=is_there & (idx == 0), other=-1)
        is_same = tl.max(((draft == ids) & (idx == 0)).to(tl.int32), 0) != 0
    else:
        is_same = tl.load(forced + tl.load(start), mask=is_there, other=0) != 0
    return is_same


@jit
def _commit_kernel(
    new_ids,
    num_accepted,
    failed,
    would_be_accepted,
    batch_rows,
    query_start_loc,
    logit_start_loc,
    query_lens,
    stop_ids,
    max_total,
    token_ids,
    num_computed,
    num_tokens,
    num_drafts,
    status,
    step_start,
    out,
    sizes,  # of rows of tokens, stop tokens, new tokens and results
    RUNNING: tl.constexpr,
    STOPPED: tl.constexpr,
    LENGTH: tl.constexpr,
    ERROR: tl.constexpr,
    HEADER: tl.constexpr,
    MATCH: tl.constexpr,
    STOPS: tl.constexpr,
    WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per request. Padding shares the scratch row, which does not run and is not written."""
    wait_for_last(EARLY)
    let_next_start(EARLY)
    max_len, num_stop_ids, width, num_columns = sizes
    i = tl.program_id(0)
    row = tl.load(batch_rows + i).to(tl.int64)
    before, query_len = tl.load(status + row), tl.load(query_lens + i)
    runs = (before == RUNNING) & (query_len > 0)
    planned = tl.load(query_start_loc + i + 1) - tl.load(query_start_loc + i)
    known = planned - (tl.load(logit_start_loc + i + 1) - tl.load(logit_start_loc + i)) + 1
    computed, length, limit = tl.load(num_computed + row), tl.load(num_tokens + row), tl.load(max_total + row)
    draws = runs & (computed + known == length)
    bad, idx = tl.load(failed + i) != 0, tl.arange(0, WIDTH)

    ids = tl.load(new_ids + i.to(tl.int64) * width + idx, mask=idx < width, other=-2).to(tl.int32)
    accepted = tl.load(num_accepted + i)
    count = tl.minimum(accepted + tl.where(bad, 0, 1), limit - length)
    first_end = _first_stop(ids, idx, count, stop_ids + row * num_stop_ids, num_stop_ids, STOPS, WIDTH)
    stopped = first_end < WIDTH
    bad = bad & (stopped == 0)  # tokens after a stop are dropped
    takes = draws & (bad == 0)
    count = tl.where(takes, tl.where(stopped, first_end + 1, count), 0)

    # For a draft that is about to be overwritten.
    accepts = takes & (planned == known) & (tl.load(num_drafts + row) > 0)
    pointers = token_ids + row * max_len + tl.minimum(length + idx, max_len - 1)
    accepts = accepts & _would_be_accepted(accepts, pointers, ids, idx, would_be_accepted, logit_start_loc + i, MATCH)
    tl.store(pointers, ids, mask=idx < count)
    after = tl.where(takes & stopped, STOPPED, tl.where(takes & (length + count >= limit), LENGTH, before))
    after = tl.where(draws & bad, ERROR, after)
    tl.store(num_computed + row, computed + known + tl.maximum(count - 1, 0), mask=runs)
    tl.store(num_tokens + row, length + count, mask=takes)
    tl.store(num_drafts + row, 0, mask=runs)
    tl.store(status + row, after, mask=runs)
    tl.store(step_start + row, tl.where(runs, computed + 1, 0))
    result = out + i.to(tl.int64) * (num_columns + HEADER)
    tl.store(result, after)
    tl.store(result + 1, tl.where(draws, query_len - known, 0))
    tl.store(result + 2, tl.where(takes, tl.minimum(accepted, count), 0))
    tl.store(result + 3, accepts.to(tl.int32))
    tl.store(result + HEADER + idx, tl.where(idx < count, ids, -1), mask=idx < num_columns)
