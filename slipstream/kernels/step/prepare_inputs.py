"""From request rows to the inputs of a forward pass, on the device.

The host knows how many query tokens each request has, but not which tokens, nor the exact length: a step in flight may
still change both. A request's query tokens are known tokens and then draft slots; drafts follow a row's tokens. Unused
draft slots, and all tokens of a row that stopped since the plan was made, are padding: at position 0, not written to
the cache, not counted in any length. Padding uses the tokens of the scratch row: zeros, except while steps are timed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.device.operation import operation
from slipstream.kernels.native.step import (
    StepInputsRecord,
    TokensRecord,
    batch_record,
    compiled,
    in_c,
    record,
    rows_record,
)
from slipstream.kernels.request_rows import RowState
from slipstream.kernels.triton_jit import jit, next_power_of_2, runs_triton, tl
from slipstream.plan import RowStatus

_BLOCK = 1024
_ANY_ID = 2**31 - 1


class BatchLayout(NamedTuple):
    """The requests of a step, and the first token and first logit of each."""

    batch_rows: Tensor  # [padded_reqs] int32; padding names the scratch row, which never runs
    query_start_loc: Tensor  # [padded_reqs + 1] int32; padding repeats the last value
    logit_start_loc: Tensor  # [padded_reqs + 1] int32: one for the last known token and one per draft slot


class TokenInputs(NamedTuple):
    """A forward pass's inputs for each token."""

    input_ids: Tensor  # [padded_tokens] int32
    positions: Tensor  # [padded_tokens] int64
    slot_mapping: Tensor  # [padded_tokens] int64; -1: not stored


class StepInputs(NamedTuple):
    """The inputs of a step, each filled up to its padded size."""

    tokens: TokenInputs
    query_lens: Tensor  # [padded_reqs] int32: tokens that are not padding
    seq_lens: Tensor  # [padded_reqs] int32
    block_table: Tensor  # [padded_reqs, max_pages] int32
    logit_indices: Tensor  # [padded_logits] int64: the tokens that have logits
    logit_rows: Tensor  # [padded_logits] int32: their request's row; the scratch row in padding
    logit_positions: Tensor  # [padded_logits] int32: the position of the token that they choose
    logit_drafts: Tensor  # [padded_logits] int32: the draft at that position, or -1


@operation(writes=("inputs",))
def prepare_inputs(
    rows: RowState,
    batch: BatchLayout,
    page_size: int,
    max_logits: int,  # maximum logits of one request
    inputs: StepInputs,  # written
) -> None:
    if runs_triton(batch.batch_rows):
        _launch(rows, batch, page_size, max_logits, inputs)
        return
    own, start_loc = batch.batch_rows.long(), batch.query_start_loc
    num_computed, num_tokens = rows.num_computed[own], rows.num_tokens[own]
    planned, max_drafts = start_loc.diff(), batch.logit_start_loc.diff() - 1
    runs = (rows.status[own] == RowStatus.RUNNING) & (planned > 0)
    known = torch.minimum(planned - max_drafts, num_tokens - num_computed)
    drafts = torch.minimum(rows.num_drafts[own], max_drafts)
    # Drafts follow the last known token; a prefill chunk that ends before it has none.
    drafts = torch.where(num_computed + known == num_tokens, drafts, 0)
    inputs.query_lens.copy_(torch.where(runs, known + drafts, 0))
    inputs.seq_lens.copy_(torch.where(runs, num_computed + known + drafts, 0))
    torch.index_select(rows.page_table, 0, own, out=inputs.block_table)
    sources = TokenSources(own, start_loc, inputs.query_lens, num_computed, page_size)
    fill_tokens(rows, sources, inputs.tokens)
    _fill_logits(rows, batch, torch.where(runs, drafts, 0), inputs)


@in_c(prepare_inputs)
def _prepare_in_c(rows: RowState, batch: BatchLayout, page_size: int, max_logits: int, inputs: StepInputs) -> None:
    step = record(StepInputsRecord, *inputs[1:], inputs.logit_indices.shape[0], page_size)
    compiled().slip_prepare_inputs(rows_record(rows), batch_record(*batch), tokens_record(inputs.tokens), step)


def tokens_record(tokens: TokenInputs) -> Any:
    return record(TokensRecord, *tokens, tokens.input_ids.shape[0])


def _launch(rows: RowState, batch: BatchLayout, page_size: int, max_logits: int, inputs: StepInputs) -> None:
    num_reqs, max_pages = inputs.block_table.shape
    num_tokens_padded = inputs.tokens.input_ids.shape[0]
    # Programs of a request share its tokens and its pages; the last row of programs fills the padding.
    num_blocks = -(-max(max_pages, min(num_tokens_padded, 4 * _BLOCK)) // _BLOCK)
    _prepare_kernel[(num_blocks, num_reqs + 1)](
        batch.batch_rows,
        batch.query_start_loc,
        batch.logit_start_loc,
        rows.token_ids,
        rows.token_ids[-1],
        rows.page_table,
        rows.num_computed,
        rows.num_tokens,
        rows.num_drafts,
        rows.status,
        inputs.tokens.input_ids,
        inputs.tokens.positions,
        inputs.tokens.slot_mapping,
        inputs.query_lens,
        inputs.seq_lens,
        inputs.block_table,
        inputs.logit_indices,
        inputs.logit_rows,
        inputs.logit_positions,
        inputs.logit_drafts,
        num_reqs,
        num_tokens_padded,
        inputs.logit_indices.shape[0],
        rows.token_ids.shape[0] - 1,
        rows.token_ids.stride(0),
        max_pages,
        page_size,
        RUNNING=int(RowStatus.RUNNING),
        BLOCK=_BLOCK,
        LOGITS=next_power_of_2(max_logits),
    )


def _fill_logits(
    rows: RowState,
    batch: BatchLayout,
    drafts: Tensor,  # [padded_reqs]: how many each request has
    inputs: StepInputs,  # written
) -> None:
    """A request's logits are those of its last tokens."""
    start_loc, own, token_ids = batch.logit_start_loc, batch.batch_rows.long(), rows.token_ids
    total, counts = int(start_loc[-1]), start_loc.diff()
    request = torch.repeat_interleave(counts, output_size=total)
    idx = torch.arange(total, dtype=torch.int32) - start_loc[request]
    inputs.logit_indices[:total] = (batch.query_start_loc[1:] - counts)[request] + idx
    inputs.logit_rows[:total] = own[request]
    # The position after a missing draft is not used, but must lie inside the row.
    drafts = drafts[request]
    position = rows.num_tokens[own][request] + torch.minimum(idx, drafts)
    inputs.logit_positions[:total] = position
    draft_ids = token_ids[own[request], position.clamp(max=token_ids.shape[1] - 1).long()]
    inputs.logit_drafts[:total] = torch.where(idx < drafts, draft_ids, -1)
    inputs.logit_indices[total:] = 0
    inputs.logit_rows[total:] = token_ids.shape[0] - 1
    inputs.logit_positions[total:] = 0
    inputs.logit_drafts[total:] = -1


class TokenSources(NamedTuple):
    """The tokens of the rows that a pass processes."""

    rows: Tensor  # [padded_reqs] int64
    query_start_loc: Tensor
    query_lens: Tensor  # tokens that are not padding
    first: Tensor  # [padded_reqs]: the position of each request's first token
    page_size: int
    vocab_size: int = _ANY_ID  # tokens that the model does not know become 0


def fill_tokens(
    rows: RowState,
    sources: TokenSources,
    tokens: TokenInputs,  # written
) -> None:
    """Tokens, positions and slots of all requests from their rows; padding comes after all of them."""
    start_loc, token_ids, page_size = sources.query_start_loc, rows.token_ids, sources.page_size
    total = int(start_loc[-1])
    request = torch.repeat_interleave(start_loc.diff(), output_size=total)
    row, idx = sources.rows[request], torch.arange(total, dtype=torch.int32) - start_loc[request]
    exists = idx < sources.query_lens[request]
    position = torch.where(exists, sources.first[request] + idx, 0).long()
    ids = token_ids[-1, torch.arange(tokens.input_ids.shape[0]) % token_ids.shape[1]]
    ids[:total] = torch.where(exists, token_ids[row, position], ids[:total])
    tokens.input_ids.copy_(torch.where(ids < sources.vocab_size, ids, 0))
    tokens.positions[:total] = position
    page_id = rows.page_table[row, position // page_size].long()
    tokens.slot_mapping[:total] = torch.where(exists, page_id * page_size + position % page_size, -1)
    tokens.positions[total:] = 0
    tokens.slot_mapping[total:] = -1


@jit
def fill_padding(scratch, input_ids, positions, slot_mapping, slot, start, num_tokens, max_len, vocab_size, stride):
    """After the last request's tokens."""
    for at in range(start, num_tokens, stride):
        exists = at + slot < num_tokens
        ids = tl.load(scratch + (at + slot) % max_len, mask=exists, other=0)
        tl.store(input_ids + at + slot, tl.where(ids < vocab_size, ids, 0), mask=exists)
        tl.store(positions + at + slot, 0, mask=exists)
        tl.store(slot_mapping + at + slot, -1, mask=exists)


@jit
def fill_request(
    tokens_in_row,
    scratch,
    pages_in_row,
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
):
    """One request's tokens, then its padding."""
    for at in range(0, planned, stride):
        exists, alive = at + slot < planned, at + slot < query_len
        position = tl.where(alive, first + at + slot, 0)
        token = start + at + slot
        ids = tl.load(tokens_in_row + position, mask=alive, other=0)
        ids += tl.load(scratch + token % max_len, mask=exists & (alive == 0), other=0)
        page = tl.load(pages_in_row + position // page_size, mask=alive, other=0).to(tl.int64)
        tl.store(input_ids + token, tl.where(ids < vocab_size, ids, 0), mask=exists)
        tl.store(positions + token, position.to(tl.int64), mask=exists)
        place = page * page_size + position % page_size
        tl.store(slot_mapping + token, tl.where(alive, place, -1), mask=exists)


@jit
def copy_pages(pages_in_row, table_of_request, slot, max_pages):
    is_page = slot < max_pages
    tl.store(table_of_request + slot, tl.load(pages_in_row + slot, mask=is_page, other=0), mask=is_page)


@jit
def _pad_logits(logit_indices, logit_rows, logit_positions, logit_drafts, slot, start, num_logits, scratch_row, stride):
    for at in range(start, num_logits, stride):
        exists = at + slot < num_logits
        tl.store(logit_indices + at + slot, 0, mask=exists)
        tl.store(logit_rows + at + slot, scratch_row, mask=exists)
        tl.store(logit_positions + at + slot, 0, mask=exists)
        tl.store(logit_drafts + at + slot, -1, mask=exists)


@jit
def _prepare_kernel(
    batch_rows,
    query_start_loc,
    logit_start_loc,
    token_ids,
    scratch,
    page_table,
    num_computed,
    num_tokens,
    num_drafts,
    status,
    input_ids,
    positions,
    slot_mapping,
    query_lens,
    seq_lens,
    block_table,
    logit_indices,
    logit_rows,
    logit_positions,
    logit_drafts,
    num_reqs,
    num_padded,
    num_logits_padded,
    scratch_row,
    max_len,
    max_pages,
    page_size,
    RUNNING: tl.constexpr,
    BLOCK: tl.constexpr,
    LOGITS: tl.constexpr,
):
    block, i, stride = tl.program_id(0), tl.program_id(1), tl.num_programs(0) * BLOCK
    slot = block * BLOCK + tl.arange(0, BLOCK)
    start, first_logit = tl.load(query_start_loc + i), tl.load(logit_start_loc + i)
    if i == num_reqs:
        fill_padding(scratch, input_ids, positions, slot_mapping, slot, start, num_padded, max_len, 0x7FFFFFFF, stride)
        _pad_logits(
            logit_indices,
            logit_rows,
            logit_positions,
            logit_drafts,
            slot,
            first_logit,
            num_logits_padded,
            scratch_row,
            stride,
        )
    else:
        row = tl.load(batch_rows + i).to(tl.int64)
        planned = tl.load(query_start_loc + i + 1) - start
        num_logits = tl.load(logit_start_loc + i + 1) - first_logit
        computed, length = tl.load(num_computed + row), tl.load(num_tokens + row)
        runs = (tl.load(status + row) == RUNNING) & (planned > 0)
        known = tl.minimum(planned - num_logits + 1, length - computed)
        # Drafts follow the last known token; a prefill chunk that ends before it has none.
        drafts = tl.minimum(tl.load(num_drafts + row), num_logits - 1)
        drafts = tl.where(runs & (computed + known == length), drafts, 0)
        query_len = tl.where(runs, known + drafts, 0)
        if block == 0:
            tl.store(query_lens + i, query_len)
            tl.store(seq_lens + i, tl.where(runs, computed + query_len, 0))
            idx = tl.arange(0, LOGITS)
            exists = idx < num_logits
            tl.store(logit_indices + first_logit + idx, (start + planned - num_logits + idx).to(tl.int64), mask=exists)
            tl.store(logit_rows + first_logit + idx, row.to(tl.int32), mask=exists)
            # The position after a missing draft is not used, but must lie inside the row.
            tl.store(logit_positions + first_logit + idx, length + tl.minimum(idx, drafts), mask=exists)
            draft = tl.load(token_ids + row * max_len + length + idx, mask=exists & (idx < drafts), other=-1)
            tl.store(logit_drafts + first_logit + idx, draft, mask=exists)
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
            computed,
            page_size,
            max_len,
            0x7FFFFFFF,
            stride,
            input_ids,
            positions,
            slot_mapping,
        )
