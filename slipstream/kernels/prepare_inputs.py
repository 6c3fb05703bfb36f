"""From request rows to the inputs of a forward pass, on the device.

The host knows how many query tokens each request has, but not which tokens, nor the exact length: a step in flight may
still change both. A request's query tokens are known ones and then as many as could be drafts; drafts stand in the row
behind its tokens. Drafts that were not made, and all tokens of a row that stopped since the plan was made, are dead:
at position 0, nothing written to the cache, not counted in any length. They and the padding are the scratch row's
tokens: zeros, but where steps are timed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import operation
from slipstream.kernels.triton_jit import jit, next_power_of_2, runs_triton, tl
from slipstream.types import RowStatus

_BLOCK = 1024
_ANY_ID = 2**31 - 1


@operation(
    writes=(
        *("input_ids", "positions", "slot_mapping", "query_lens", "seq_lens", "block_table"),
        *("logit_indices", "logit_rows", "logit_positions", "logit_drafts"),
    ),
)
def prepare_inputs(
    batch_rows: Tensor,  # [padded_reqs] int32; padding names the scratch row, which never runs
    query_start_loc: Tensor,  # [padded_reqs + 1] int32; padding repeats the last value
    logit_start_loc: Tensor,  # [padded_reqs + 1] int32: one for the last known token and one for each possible draft
    token_ids: Tensor,  # [num_rows, max_len] int32; the last row is scratch
    page_table: Tensor,  # [num_rows, max_pages] int32
    num_computed: Tensor,  # [num_rows] int32
    num_tokens: Tensor,  # [num_rows] int32
    num_drafts: Tensor,  # [num_rows] int32: drafts behind the tokens
    status: Tensor,  # [num_rows] int32
    page_size: int,
    max_logits: int,  # most logits of one request
    # written, each up to its padded size:
    input_ids: Tensor,  # [padded_tokens] int32
    positions: Tensor,  # [padded_tokens] int64
    slot_mapping: Tensor,  # [padded_tokens] int64
    query_lens: Tensor,  # [padded_reqs] int32: living tokens
    seq_lens: Tensor,  # [padded_reqs] int32
    block_table: Tensor,  # [padded_reqs, max_pages] int32
    logit_indices: Tensor,  # [padded_logits] int64: tokens whose logits are wanted
    logit_rows: Tensor,  # [padded_logits] int32: whose they are; the scratch row in padding
    logit_positions: Tensor,  # [padded_logits] int32: where the token they choose will stand
    logit_drafts: Tensor,  # [padded_logits] int32: the draft that stands there, or -1
) -> None:
    if runs_triton(batch_rows):
        num_reqs, max_pages = block_table.shape
        num_tokens_padded = input_ids.shape[0]
        # Blocks of a request share its tokens and its pages; the last row of programs fills the padding.
        num_blocks = -(-max(max_pages, min(num_tokens_padded, 4 * _BLOCK)) // _BLOCK)
        _prepare_kernel[(num_blocks, num_reqs + 1)](
            *(batch_rows, query_start_loc, logit_start_loc, token_ids, token_ids[-1], page_table),
            *(num_computed, num_tokens, num_drafts, status),
            *(input_ids, positions, slot_mapping, query_lens, seq_lens, block_table),
            *(logit_indices, logit_rows, logit_positions, logit_drafts),
            *(num_reqs, num_tokens_padded, logit_indices.shape[0], token_ids.shape[0] - 1),
            *(token_ids.stride(0), max_pages, page_size),
            RUNNING=int(RowStatus.RUNNING),
            BLOCK=_BLOCK,
            LOGITS=next_power_of_2(max_logits),
        )
        return
    rows = batch_rows.long()
    planned, max_drafts = query_start_loc.diff(), logit_start_loc.diff() - 1
    runs = (status[rows] == RowStatus.RUNNING) & (planned > 0)
    known = torch.minimum(planned - max_drafts, num_tokens[rows] - num_computed[rows])
    drafts = torch.minimum(num_drafts[rows], max_drafts)
    # Drafts follow the last known token; a chunk that ends before it has none.
    drafts = torch.where(num_computed[rows] + known == num_tokens[rows], drafts, 0)
    query_lens.copy_(torch.where(runs, known + drafts, 0))
    seq_lens.copy_(torch.where(runs, num_computed[rows] + known + drafts, 0))
    torch.index_select(page_table, 0, rows, out=block_table)
    tables = (token_ids, page_table, page_size, _ANY_ID)
    fill_tokens(rows, query_start_loc, query_lens, num_computed[rows], *tables, input_ids, positions, slot_mapping)
    drafts = torch.where(runs, drafts, 0)
    starts = (query_start_loc, logit_start_loc)
    _fill_logits(rows, *starts, drafts, num_tokens, token_ids, logit_indices, logit_rows, logit_positions, logit_drafts)


def _fill_logits(
    rows: Tensor,  # [padded_reqs] int64
    query_start_loc: Tensor,
    logit_start_loc: Tensor,
    drafts: Tensor,  # [padded_reqs]: living ones
    num_tokens: Tensor,
    token_ids: Tensor,
    logit_indices: Tensor,
    logit_rows: Tensor,
    logit_positions: Tensor,
    logit_drafts: Tensor,
) -> None:
    """A request's logits are those of its last tokens."""
    total, counts = int(logit_start_loc[-1]), logit_start_loc.diff()
    request = torch.repeat_interleave(counts, output_size=total)
    idx = torch.arange(total, dtype=torch.int32) - logit_start_loc[request]
    logit_indices[:total] = (query_start_loc[1:] - counts)[request] + idx
    logit_rows[:total] = rows[request]
    # What chooses behind a draft that is not there is looked at by nobody, but must not point outside the row.
    drafts = drafts[request]
    position = num_tokens[rows][request] + torch.minimum(idx, drafts)
    logit_positions[:total] = position
    stands = token_ids[rows[request], position.clamp(max=token_ids.shape[1] - 1).long()]
    logit_drafts[:total] = torch.where(idx < drafts, stands, -1)
    logit_indices[total:] = 0
    logit_rows[total:] = token_ids.shape[0] - 1
    logit_positions[total:] = 0
    logit_drafts[total:] = -1


def fill_tokens(
    rows: Tensor,  # [padded_reqs] int64
    query_start_loc: Tensor,
    query_lens: Tensor,  # living tokens
    first: Tensor,  # [padded_reqs]: the position of each request's first token
    token_ids: Tensor,
    page_table: Tensor,
    page_size: int,
    vocab_size: int,  # a token that the model does not know is 0 to it
    input_ids: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Tokens, positions and slots of all requests from their rows; padding tokens come after all of them."""
    total = int(query_start_loc[-1])
    request = torch.repeat_interleave(query_start_loc.diff(), output_size=total)
    row, idx = rows[request], torch.arange(total, dtype=torch.int32) - query_start_loc[request]
    alive = idx < query_lens[request]
    position = torch.where(alive, first[request] + idx, 0).long()
    ids = token_ids[-1, torch.arange(input_ids.shape[0]) % token_ids.shape[1]]
    ids[:total] = torch.where(alive, token_ids[row, position], ids[:total])
    input_ids.copy_(torch.where(ids < vocab_size, ids, 0))
    positions[:total] = position
    page_id = page_table[row, position // page_size].long()
    slot_mapping[:total] = torch.where(alive, page_id * page_size + position % page_size, -1)
    positions[total:] = 0
    slot_mapping[total:] = -1


@jit
def fill_padding(scratch, input_ids, positions, slot_mapping, slot, start, num_tokens, max_len, vocab_size, stride):
    """Behind the last request's tokens."""
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
    """One request's tokens, living ones first."""
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
            *(logit_indices, logit_rows, logit_positions, logit_drafts),
            *(slot, first_logit, num_logits_padded, scratch_row, stride),
        )
    else:
        row = tl.load(batch_rows + i).to(tl.int64)
        planned = tl.load(query_start_loc + i + 1) - start
        num_logits = tl.load(logit_start_loc + i + 1) - first_logit
        computed, length = tl.load(num_computed + row), tl.load(num_tokens + row)
        runs = (tl.load(status + row) == RUNNING) & (planned > 0)
        known = tl.minimum(planned - num_logits + 1, length - computed)
        # Drafts follow the last known token; a chunk that ends before it has none.
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
            # What chooses behind a draft that is not there is looked at by nobody, but must not point outside the row.
            tl.store(logit_positions + first_logit + idx, length + tl.minimum(idx, drafts), mask=exists)
            stands = tl.load(token_ids + row * max_len + length + idx, mask=exists & (idx < drafts), other=-1)
            tl.store(logit_drafts + first_logit + idx, stands, mask=exists)
        pages = page_table + row * max_pages
        copy_pages(pages, block_table + i.to(tl.int64) * max_pages, slot, max_pages)
        fill_request(
            *(token_ids + row * max_len, scratch, pages, slot, start, planned, query_len, computed),
            *(page_size, max_len, 0x7FFFFFFF, stride, input_ids, positions, slot_mapping),
        )
