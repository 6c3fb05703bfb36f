"""Inputs of a draft model's passes, prepared on the device from the rows after a step.

The first pass goes over what the target has computed since the last one, with the token it drew: a prompt chunk, or
the last two tokens of a row that decodes. Two, for the last draft that was accepted may not have been through the draft
model; if it has, it is computed again, with the same result. After steps without drafts it also goes over the tokens
that it was not shown. Later passes: ``next_pass_inputs.py``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.device.operation import operation
from slipstream.kernels.native.step import PassInputsRecord, batch_record, compiled, in_c, record, rows_record
from slipstream.kernels.request_rows import RowState
from slipstream.kernels.step.prepare_inputs import (
    TokenInputs,
    TokenSources,
    copy_pages,
    fill_padding,
    fill_request,
    fill_tokens,
    tokens_record,
)
from slipstream.kernels.triton_jit import early_start, jit, let_next_start, runs_triton, tl, wait_for_last

_BLOCK = 1024


class FirstPassInputs(NamedTuple):
    """The inputs of a draft model's first pass, each filled up to its padded size."""

    tokens: TokenInputs
    query_lens: Tensor  # [padded_reqs] int32: tokens that are not padding
    seq_lens: Tensor  # [padded_reqs] int32
    draft_positions: Tensor  # [padded_reqs] int32: the position of the first draft
    last_indices: Tensor  # [padded_reqs] int64: the last token that is not padding
    block_table: Tensor  # [padded_reqs, max_pages] int32


class ShiftedPassInputs(NamedTuple):
    """The inputs of a first pass over the target's tokens, shifted by one; its own attention has the rest."""

    input_ids: Tensor  # [padded_tokens] int32: the token after each of the target's tokens
    last_indices: Tensor  # [padded_reqs] int64: the last token whose successor is known
    draft_positions: Tensor  # [padded_reqs] int32: the position of the first draft
    block_table: Tensor  # [padded_reqs, max_pages] int32


@operation(writes=("inputs",))
def prepare_first_pass(
    rows: RowState,  # a row that ended with this step is processed: its pages may be cached
    batch_rows: Tensor,  # [padded_reqs] int32; padding names the scratch row, which never runs
    start_loc: Tensor,  # [padded_reqs + 1] int32: the target's known tokens and one more each; padding repeats the last
    first_slots: Tensor,  # [padded_reqs] int32: where to begin, if before the step; else -1
    num_caught_up: int,  # maximum tokens of each request before the step's
    page_size: int,
    vocab_size: int,  # of the draft model; tokens outside it become 0
    inputs: FirstPassInputs,  # written
) -> None:
    if runs_triton(batch_rows):
        _launch_first_pass(rows, batch_rows, start_loc, first_slots, num_caught_up, page_size, vocab_size, inputs)
        return
    own, planned = batch_rows.long(), start_loc.diff()
    runs = (rows.step_start[own] != 0) & (planned > 0) & (rows.max_drafts[own] > 0)
    computed, length = rows.num_computed[own], rows.num_tokens[own]
    first = torch.where(first_slots >= 0, first_slots, computed - (planned - 1 - num_caught_up))
    # There is one more token if the target has sampled one, or if one known token is left to compute.
    query_lens = computed + (computed + 1 == length).int() - first
    inputs.query_lens.copy_(torch.where(runs, query_lens, 0))
    inputs.seq_lens.copy_(torch.where(runs, first + query_lens, 0))
    inputs.last_indices.copy_(torch.where(runs, start_loc[:-1] + query_lens - 1, 0))
    inputs.draft_positions.copy_(length)
    torch.index_select(rows.page_table, 0, own, out=inputs.block_table)
    sources = TokenSources(own, start_loc, inputs.query_lens, first, page_size, vocab_size)
    fill_tokens(rows, sources, inputs.tokens)


@in_c(prepare_first_pass)
def _prepare_first_in_c(
    rows: RowState,
    batch_rows: Tensor,
    start_loc: Tensor,
    first_slots: Tensor,
    num_caught_up: int,
    page_size: int,
    vocab_size: int,
    inputs: FirstPassInputs,
) -> None:
    lengths = (inputs.query_lens, inputs.seq_lens, inputs.draft_positions, inputs.last_indices, inputs.block_table)
    out = record(PassInputsRecord, *lengths, page_size, vocab_size)
    shared = (rows_record(rows), batch_record(batch_rows, start_loc), first_slots.data_ptr(), num_caught_up)
    compiled().slip_prepare_first_pass(*shared, tokens_record(inputs.tokens), out)


def _launch_first_pass(
    rows: RowState,
    batch_rows: Tensor,
    start_loc: Tensor,
    first_slots: Tensor,
    num_caught_up: int,
    page_size: int,
    vocab_size: int,
    inputs: FirstPassInputs,
) -> None:
    num_tokens_padded, (num_reqs, max_pages) = inputs.tokens.input_ids.shape[0], inputs.block_table.shape
    num_blocks = -(-max(max_pages, min(num_tokens_padded, 4 * _BLOCK)) // _BLOCK)
    _first_pass_kernel[(num_blocks, num_reqs + 1)](
        batch_rows,
        start_loc,
        rows.token_ids,
        rows.token_ids[-1],
        rows.page_table,
        rows.num_computed,
        rows.num_tokens,
        rows.max_drafts,
        rows.step_start,
        first_slots,
        inputs.tokens.input_ids,
        inputs.tokens.positions,
        inputs.tokens.slot_mapping,
        inputs.query_lens,
        inputs.seq_lens,
        inputs.last_indices,
        inputs.draft_positions,
        inputs.block_table,
        num_caught_up,
        num_reqs,
        num_tokens_padded,
        rows.token_ids.stride(0),
        max_pages,
        page_size,
        vocab_size,
        BLOCK=_BLOCK,
    )


@jit
def _first_pass_kernel(
    batch_rows,
    start_loc,
    token_ids,
    scratch,
    page_table,
    num_computed,
    num_tokens,
    max_drafts,
    step_start,
    first_slots,
    input_ids,
    positions,
    slot_mapping,
    query_lens,
    seq_lens,
    last_indices,
    draft_positions,
    block_table,
    num_caught_up,
    num_reqs,
    num_tokens_padded,
    max_len,
    max_pages,
    page_size,
    vocab_size,
    BLOCK: tl.constexpr,
):
    block, i, stride = tl.program_id(0), tl.program_id(1), tl.num_programs(0) * BLOCK
    slot = block * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(start_loc + i)
    if i == num_reqs:
        fill_padding(
            scratch, input_ids, positions, slot_mapping, slot, start, num_tokens_padded, max_len, vocab_size, stride
        )
    else:
        row = tl.load(batch_rows + i).to(tl.int64)
        planned = tl.load(start_loc + i + 1) - start
        runs = (tl.load(step_start + row) != 0) & (planned > 0) & (tl.load(max_drafts + row) > 0)
        computed, length = tl.load(num_computed + row), tl.load(num_tokens + row)
        first = tl.load(first_slots + i)
        first = tl.where(first >= 0, first, computed - (planned - 1 - num_caught_up))
        alive = computed + (computed + 1 == length).to(tl.int32) - first
        query_len = tl.where(runs, alive, 0)
        if block == 0:
            tl.store(query_lens + i, query_len)
            tl.store(seq_lens + i, tl.where(runs, first + alive, 0))
            tl.store(last_indices + i, tl.where(runs, start + alive - 1, 0).to(tl.int64))
            tl.store(draft_positions + i, length)
        pages = page_table + row * max_pages
        copy_pages(pages, block_table + i.to(tl.int64) * max_pages, slot, max_pages)
        fill_request(
            token_ids + row * max_len,
            scratch,
            pages,
            slot,
            start,
            planned,
            query_len,
            first,
            page_size,
            max_len,
            vocab_size,
            stride,
            input_ids,
            positions,
            slot_mapping,
        )


@operation(writes=("inputs",))
def prepare_shifted_pass(
    rows: RowState,
    batch_rows: Tensor,  # [padded_reqs] int32; padding names the scratch row, which never runs
    query_start_loc: Tensor,  # [padded_reqs + 1] int32: the target's; padding repeats the last value
    positions: Tensor,  # [padded_tokens] int64: the target's
    inputs: ShiftedPassInputs,  # written
) -> None:
    """For drafters that pair a token with the hidden state before it: the target's tokens, shifted by one.

    A prefill chunk ends with the token after it. After a rejected draft no token is known.
    """
    num_tokens_padded = inputs.input_ids.shape[0]
    if runs_triton(batch_rows):
        _launch_shifted_pass(rows, batch_rows, query_start_loc, positions, inputs)
        return
    own = batch_rows.long()
    starts, planned = query_start_loc[:-1].long(), query_start_loc.diff()
    runs = (rows.step_start[own] != 0) & (planned > 0)
    first = positions[starts.clamp(max=num_tokens_padded - 1)].int()
    inputs.last_indices.copy_(torch.where(runs, starts + rows.num_computed[own] - 1 - first, 0))
    inputs.draft_positions.copy_(rows.num_tokens[own])
    torch.index_select(rows.page_table, 0, own, out=inputs.block_table)

    total = int(query_start_loc[-1])
    request = torch.repeat_interleave(planned, output_size=total)
    next_position = first[request] + torch.arange(total, dtype=torch.int32) - query_start_loc[request] + 1
    known = runs[request] & (next_position < rows.num_tokens[own][request])
    next_ids = rows.token_ids[own[request], torch.where(known, next_position, 0).long()]
    inputs.input_ids[:total] = torch.where(known, next_ids, 0)
    inputs.input_ids[total:] = 0


@in_c(prepare_shifted_pass)
def _prepare_shifted_in_c(
    rows: RowState,
    batch_rows: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    inputs: ShiftedPassInputs,
) -> None:
    out = record(PassInputsRecord, None, None, inputs.draft_positions, inputs.last_indices, inputs.block_table, 0, 0)
    ids = (positions.data_ptr(), inputs.input_ids.data_ptr(), inputs.input_ids.shape[0])
    compiled().slip_prepare_shifted_pass(rows_record(rows), batch_record(batch_rows, query_start_loc), *ids, out)


def _launch_shifted_pass(
    rows: RowState, batch_rows: Tensor, query_start_loc: Tensor, positions: Tensor, inputs: ShiftedPassInputs
) -> None:
    num_tokens_padded, (num_reqs, max_pages) = inputs.input_ids.shape[0], inputs.block_table.shape
    num_blocks = -(-max(max_pages, min(num_tokens_padded, 4 * _BLOCK)) // _BLOCK)
    _shifted_pass_kernel[(num_blocks, num_reqs + 1)](
        batch_rows,
        query_start_loc,
        positions,
        rows.token_ids,
        rows.page_table,
        rows.num_computed,
        rows.num_tokens,
        rows.step_start,
        inputs.input_ids,
        inputs.last_indices,
        inputs.draft_positions,
        inputs.block_table,
        num_reqs,
        num_tokens_padded,
        rows.token_ids.stride(0),
        max_pages,
        BLOCK=_BLOCK,
        **early_start(batch_rows),
    )


@jit
def _shifted_pass_kernel(
    batch_rows,
    query_start_loc,
    positions,
    token_ids,
    page_table,
    num_computed,
    num_tokens,
    step_start,
    input_ids,
    last_indices,
    draft_positions,
    block_table,
    num_reqs,
    num_tokens_padded,
    max_len,
    max_pages,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_last(EARLY)
    let_next_start(EARLY)
    block, i, stride = tl.program_id(0), tl.program_id(1), tl.num_programs(0) * BLOCK
    slot = block * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(query_start_loc + i)
    if i == num_reqs:
        for at in range(start, num_tokens_padded, stride):
            tl.store(input_ids + at + slot, 0, mask=at + slot < num_tokens_padded)
    else:
        row = tl.load(batch_rows + i).to(tl.int64)
        planned = tl.load(query_start_loc + i + 1) - start
        runs = (tl.load(step_start + row) != 0) & (planned > 0)
        first = tl.load(positions + start, mask=runs, other=0).to(tl.int32)
        length = tl.load(num_tokens + row)
        if block == 0:
            last = start + tl.load(num_computed + row) - 1 - first
            tl.store(last_indices + i, tl.where(runs, last, 0).to(tl.int64))
            tl.store(draft_positions + i, length)
        copy_pages(page_table + row * max_pages, block_table + i.to(tl.int64) * max_pages, slot, max_pages)
        for at in range(0, planned, stride):
            next_position = first + at + slot + 1
            known = runs & (at + slot < planned) & (next_position < length)
            ids = tl.load(token_ids + row * max_len + next_position, mask=known, other=0)
            tl.store(input_ids + start + at + slot, ids, mask=at + slot < planned)


@operation(writes=("slots_before",))
def find_slots_before(
    query_start_loc: Tensor,  # [padded_reqs + 1] int32; padding repeats the last value
    positions: Tensor,  # [padded_tokens] int64; 0 in padding
    block_table: Tensor,  # [padded_reqs, max_pages] int32
    seq_starts: Tensor,  # [padded_reqs] int32: the first slot with the drafter's keys
    page_size: int,
    # written:
    slots_before: Tensor,  # [padded_tokens] int64: slot of the token before; in the null page if there is none
) -> None:
    """The token before may belong to this step, to an earlier one, or come from the prefix cache.

    Only heads with several modules need it, once per step: torch's own operations are fast enough.
    """
    indices = torch.arange(positions.shape[0], dtype=torch.int32, device=positions.device)
    requests = torch.searchsorted(query_start_loc[1:], indices, right=True).clamp(max=block_table.shape[0] - 1)
    before = (positions - 1).clamp(min=0)
    slots = block_table[requests, before // page_size].long() * page_size + before % page_size
    slots_before.copy_(torch.where(positions > seq_starts[requests], slots, 0))
