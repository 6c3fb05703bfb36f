"""Inputs of a draft model's passes, made on the device from rows that a step has just left.

The first pass goes over what the target has computed since the last one, with the token it drew: a prompt chunk, or
the last two tokens of a row that decodes. Two, for the last draft that was accepted may not have been through the draft
model; if it has, it is computed again, with the same result. After steps without drafts it also goes over the tokens
that it was not shown. Later passes take one draft a request each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import operation
from slipstream.kernels.prepare_inputs import copy_pages, fill_padding, fill_request, fill_tokens
from slipstream.kernels.triton_jit import early_start, jit, let_next_start, runs_triton, tl, wait_for_last
from slipstream.types import RowStatus

_BLOCK = 1024


@operation(
    writes=(
        "input_ids",
        "positions",
        "slot_mapping",
        "query_lens",
        "seq_lens",
        "last_indices",
        "draft_positions",
        "block_table",
    ),
)
def prepare_first_pass(
    batch_rows: Tensor,  # [padded_reqs] int32; padding names the scratch row, which never runs
    start_loc: Tensor,  # [padded_reqs + 1] int32: the target's known tokens and one more each; padding repeats the last
    token_ids: Tensor,  # [num_rows, max_len] int32; the last row is scratch
    page_table: Tensor,  # [num_rows, max_pages] int32
    num_computed: Tensor,  # [num_rows] int32
    num_tokens: Tensor,  # [num_rows] int32
    max_drafts: Tensor,  # [num_rows] int32: a row at 0 has no drafts, hence no passes
    ran: Tensor,  # [num_rows] int32: a row that ended with this step goes through it: its pages may be found again
    first_slots: Tensor,  # [padded_reqs] int32: where to begin, where that is before the step did; else -1
    num_caught_up: int,  # how many of each request's places are for tokens before the step's
    page_size: int,
    vocab_size: int,  # of the draft model; a token it does not know is 0 to it
    # written, each up to its padded size:
    input_ids: Tensor,  # [padded_tokens] int32
    positions: Tensor,  # [padded_tokens] int64
    slot_mapping: Tensor,  # [padded_tokens] int64
    query_lens: Tensor,  # [padded_reqs] int32: living tokens
    seq_lens: Tensor,  # [padded_reqs] int32
    last_indices: Tensor,  # [padded_reqs] int64: the last living token
    draft_positions: Tensor,  # [padded_reqs] int32: where the first draft will stand
    block_table: Tensor,  # [padded_reqs, max_pages] int32
) -> None:
    if runs_triton(batch_rows):
        num_tokens_padded, (num_reqs, max_pages) = input_ids.shape[0], block_table.shape
        num_blocks = -(-max(max_pages, min(num_tokens_padded, 4 * _BLOCK)) // _BLOCK)
        _first_pass_kernel[(num_blocks, num_reqs + 1)](
            *(batch_rows, start_loc, token_ids, token_ids[-1], page_table),
            *(num_computed, num_tokens, max_drafts, ran, first_slots),
            *(input_ids, positions, slot_mapping, query_lens, seq_lens, last_indices, draft_positions, block_table),
            *(num_caught_up, num_reqs, num_tokens_padded, token_ids.stride(0), max_pages, page_size, vocab_size),
            BLOCK=_BLOCK,
        )
        return
    rows = batch_rows.long()
    planned = start_loc.diff()
    runs = (ran[rows] != 0) & (planned > 0) & (max_drafts[rows] > 0)
    computed = num_computed[rows]
    first = torch.where(first_slots >= 0, first_slots, computed - (planned - 1 - num_caught_up))
    # The one more is there if the target has drawn a token, or if one known token is left to compute.
    alive = computed + (computed + 1 == num_tokens[rows]).int() - first
    query_lens.copy_(torch.where(runs, alive, 0))
    seq_lens.copy_(torch.where(runs, first + alive, 0))
    last_indices.copy_(torch.where(runs, start_loc[:-1] + alive - 1, 0))
    draft_positions.copy_(num_tokens[rows])
    torch.index_select(page_table, 0, rows, out=block_table)
    fill_tokens(
        *(rows, start_loc, query_lens, first, token_ids, page_table, page_size, vocab_size),
        *(input_ids, positions, slot_mapping),
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
    ran,
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
            *(scratch, input_ids, positions, slot_mapping, slot, start, num_tokens_padded, max_len, vocab_size, stride)
        )
    else:
        row = tl.load(batch_rows + i).to(tl.int64)
        planned = tl.load(start_loc + i + 1) - start
        runs = (tl.load(ran + row) != 0) & (planned > 0) & (tl.load(max_drafts + row) > 0)
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
            *(token_ids + row * max_len, scratch, pages, slot, start, planned, query_len, first),
            *(page_size, max_len, vocab_size, stride, input_ids, positions, slot_mapping),
        )


@operation(writes=("input_ids", "last_indices", "draft_positions", "block_table"))
def prepare_shifted_pass(
    batch_rows: Tensor,  # [padded_reqs] int32; padding names the scratch row, which never runs
    query_start_loc: Tensor,  # [padded_reqs + 1] int32: the target's; padding repeats the last value
    positions: Tensor,  # [padded_tokens] int64: the target's
    token_ids: Tensor,  # [num_rows, max_len] int32
    page_table: Tensor,  # [num_rows, max_pages] int32
    num_computed: Tensor,  # [num_rows] int32
    num_tokens: Tensor,  # [num_rows] int32
    ran: Tensor,  # [num_rows] int32
    # written, each up to its padded size:
    input_ids: Tensor,  # [padded_tokens] int32: behind each of the target's tokens the next one
    last_indices: Tensor,  # [padded_reqs] int64: the last token whose next one is known
    draft_positions: Tensor,  # [padded_reqs] int32: where the first draft will stand
    block_table: Tensor,  # [padded_reqs, max_pages] int32
) -> None:
    """For drafters that pair a token with the hidden state before it: the target's tokens, moved on by one.

    A chunk of a prompt ends with the token behind it. Behind a draft that was rejected nothing is known.
    """
    num_tokens_padded, (num_reqs, max_pages) = input_ids.shape[0], block_table.shape
    if runs_triton(batch_rows):
        num_blocks = -(-max(max_pages, min(num_tokens_padded, 4 * _BLOCK)) // _BLOCK)
        _shifted_pass_kernel[(num_blocks, num_reqs + 1)](
            *(batch_rows, query_start_loc, positions, token_ids, page_table, num_computed, num_tokens, ran),
            *(input_ids, last_indices, draft_positions, block_table),
            *(num_reqs, num_tokens_padded, token_ids.stride(0), max_pages),
            BLOCK=_BLOCK,
            **early_start(batch_rows),
        )
        return
    rows = batch_rows.long()
    starts, planned = query_start_loc[:-1].long(), query_start_loc.diff()
    runs = (ran[rows] != 0) & (planned > 0)
    first = positions[starts.clamp(max=num_tokens_padded - 1)].int()
    last_indices.copy_(torch.where(runs, starts + num_computed[rows] - 1 - first, 0))
    draft_positions.copy_(num_tokens[rows])
    torch.index_select(page_table, 0, rows, out=block_table)

    total = int(query_start_loc[-1])
    request = torch.repeat_interleave(planned, output_size=total)
    next_position = first[request] + torch.arange(total, dtype=torch.int32) - query_start_loc[request] + 1
    known = runs[request] & (next_position < num_tokens[rows][request])
    input_ids[:total] = torch.where(known, token_ids[rows[request], torch.where(known, next_position, 0).long()], 0)
    input_ids[total:] = 0


@jit
def _shifted_pass_kernel(
    batch_rows,
    query_start_loc,
    positions,
    token_ids,
    page_table,
    num_computed,
    num_tokens,
    ran,
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
        runs = (tl.load(ran + row) != 0) & (planned > 0)
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
    positions: Tensor,  # [padded_tokens] int64; of a request's dead tokens and of padding 0
    block_table: Tensor,  # [padded_reqs, max_pages] int32
    seq_starts: Tensor,  # [padded_reqs] int32: from where on a request has the drafter's keys
    page_size: int,
    # written:
    slots_before: Tensor,  # [padded_tokens] int64: where the token before lies; in the null page if there is none
) -> None:
    """Whether the token before belongs to this step, to an earlier one, or came from the prefix cache.

    Heads of several modules alone ask for it, once a step: torch's own operations will do.
    """
    places = torch.arange(positions.shape[0], dtype=torch.int32, device=positions.device)
    requests = torch.searchsorted(query_start_loc[1:], places, right=True).clamp(max=block_table.shape[0] - 1)
    before = (positions - 1).clamp(min=0)
    slots = block_table[requests, before // page_size].long() * page_size + before % page_size
    slots_before.copy_(torch.where(positions > seq_starts[requests], slots, 0))


@operation(writes=("input_ids", "positions", "slot_mapping", "query_lens", "seq_lens", "draft_positions"))
def prepare_next_pass(
    before: Tensor,  # [padded_reqs] int32: the draft found last, -1 where there is none
    idx: int,  # which draft this pass is to find
    batch_rows: Tensor,  # [padded_reqs] int32
    page_table: Tensor,  # [num_rows, max_pages] int32
    num_computed: Tensor,  # [num_rows] int32
    num_tokens: Tensor,  # [num_rows] int32
    max_drafts: Tensor,  # [num_rows] int32
    max_total: Tensor,  # [num_rows] int32
    status: Tensor,  # [num_rows] int32
    page_size: int,
    slots_before: int,  # how far before the draft's own slot its keys lie
    # written:
    input_ids: Tensor,  # [padded_reqs] int32
    positions: Tensor,  # [padded_reqs] int64
    slot_mapping: Tensor,  # [padded_reqs] int64
    query_lens: Tensor,  # [padded_reqs] int32: 1 or 0
    seq_lens: Tensor,  # [padded_reqs] int32
    draft_positions: Tensor,  # [padded_reqs] int32
) -> None:
    """A request takes part while the draft to be found could be of use."""
    if runs_triton(batch_rows):
        _next_pass_kernel[(batch_rows.shape[0],)](
            *(before, idx, batch_rows, page_table, num_computed, num_tokens, max_drafts, max_total, status),
            *(input_ids, positions, slot_mapping, query_lens, seq_lens, draft_positions),
            *(before.stride(0), page_table.stride(0), page_size, slots_before),
            RUNNING=int(RowStatus.RUNNING),
            num_warps=1,
            **early_start(batch_rows),
        )
        return
    rows = batch_rows.long()
    length = num_tokens[rows]
    runs = (status[rows] == RowStatus.RUNNING) & (num_computed[rows] + 1 == length) & (before >= 0)
    runs &= (idx < max_drafts[rows]) & (idx < max_total[rows] - length - 1)
    position = torch.where(runs, length + idx - 1 - slots_before, 0).long()
    page_id = page_table[rows, position // page_size].long()
    input_ids.copy_(torch.where(runs, before, 0))
    positions.copy_(position)
    slot_mapping.copy_(torch.where(runs, page_id * page_size + position % page_size, -1))
    query_lens.copy_(runs)
    seq_lens.copy_(torch.where(runs, position + 1, 0))
    draft_positions.copy_(length + idx)


@jit
def _next_pass_kernel(
    before_ids,
    idx,
    batch_rows,
    page_table,
    num_computed,
    num_tokens,
    max_drafts,
    max_total,
    status,
    input_ids,
    positions,
    slot_mapping,
    query_lens,
    seq_lens,
    draft_positions,
    stride,
    max_pages,
    page_size,
    slots_before,
    RUNNING: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_last(EARLY)
    let_next_start(EARLY)
    i = tl.program_id(0)
    row = tl.load(batch_rows + i).to(tl.int64)
    length = tl.load(num_tokens + row)
    before = tl.load(before_ids + i.to(tl.int64) * stride)
    runs = (tl.load(status + row) == RUNNING) & (tl.load(num_computed + row) + 1 == length) & (before >= 0)
    runs = runs & (idx < tl.load(max_drafts + row)) & (idx < tl.load(max_total + row) - length - 1)
    position = tl.where(runs, length + idx - 1 - slots_before, 0)
    page = tl.load(page_table + row * max_pages + position // page_size).to(tl.int64)
    tl.store(input_ids + i, tl.where(runs, before, 0))
    tl.store(positions + i, position.to(tl.int64))
    tl.store(slot_mapping + i, tl.where(runs, page * page_size + position % page_size, -1))
    tl.store(query_lens + i, runs.to(tl.int32))
    tl.store(seq_lens + i, tl.where(runs, position + 1, 0))
    tl.store(draft_positions + i, length + idx)
