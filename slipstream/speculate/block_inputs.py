"""Inputs of a pass over blocks, made on the device: of each request its newest token and masks for those to come."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.device.operation import operation
from slipstream.kernels.request_rows import RowState
from slipstream.kernels.step.prepare_inputs import TokenInputs, copy_pages
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

_BLOCK = 1024


class BlockShape(NamedTuple):
    length: int  # tokens of a block
    num_places: int  # drafts of a block
    mask_id: int


class BlockInputs(NamedTuple):
    """One block for each request; unused tokens are at position 0, and not stored."""

    tokens: TokenInputs  # of [padded_reqs * length] tokens
    query_lens: Tensor  # [padded_reqs] int32: tokens that are not padding
    seq_lens: Tensor  # [padded_reqs] int32
    block_table: Tensor  # [padded_reqs, max_pages] int32
    draft_rows: Tensor  # [padded_reqs * num_places] int32: the row of each draft
    draft_positions: Tensor  # [padded_reqs * num_places] int32: the position of each draft


@operation(writes=("inputs",))
def prepare_blocks(
    rows: RowState,  # after the step
    batch_rows: Tensor,  # [padded_reqs] int32; padding names the scratch row, which never runs
    shape: BlockShape,
    page_size: int,
    inputs: BlockInputs,  # written
) -> None:
    """A request has a block if its next step verifies drafts; near its last token, a shorter one."""
    length, num_places, mask_id = shape
    if runs_triton(batch_rows):
        _launch(rows, batch_rows, shape, page_size, inputs)
        return
    own, idx, tokens = batch_rows.long(), torch.arange(length), inputs.tokens
    num_tokens = rows.num_tokens[own]
    runs = (rows.status[own] == RowStatus.RUNNING) & (rows.num_computed[own] + 1 == num_tokens)
    runs &= rows.max_drafts[own] > 0
    query_lens = torch.where(runs, (rows.max_total[own] - num_tokens + 1).clamp(min=0, max=length), 0)
    exists = idx < query_lens.unsqueeze(1)
    positions = torch.where(exists, num_tokens.unsqueeze(1) - 1 + idx, 0).long()
    newest = rows.token_ids[own, (num_tokens - 1).clamp(min=0).long()].unsqueeze(1)
    pages = rows.page_table[own.unsqueeze(1), positions // page_size].long()
    tokens.input_ids.copy_(torch.where(exists, torch.where(idx == 0, newest, mask_id), 0).flatten())
    tokens.positions.copy_(positions.flatten())
    tokens.slot_mapping.copy_(torch.where(exists, pages * page_size + positions % page_size, -1).flatten())
    inputs.query_lens.copy_(query_lens)
    inputs.seq_lens.copy_(torch.where(runs, num_tokens - 1 + query_lens, 0))
    torch.index_select(rows.page_table, 0, own, out=inputs.block_table)
    inputs.draft_rows.copy_(batch_rows.unsqueeze(1).expand(-1, num_places).flatten())
    inputs.draft_positions.copy_((num_tokens.unsqueeze(1) + torch.arange(num_places)).flatten())


def _launch(rows: RowState, batch_rows: Tensor, shape: BlockShape, page_size: int, inputs: BlockInputs) -> None:
    num_reqs, max_pages = inputs.block_table.shape
    _blocks_kernel[(-(-max_pages // _BLOCK), num_reqs)](
        batch_rows,
        rows.token_ids,
        rows.page_table,
        rows.num_computed,
        rows.num_tokens,
        rows.max_drafts,
        rows.max_total,
        rows.status,
        inputs.tokens.input_ids,
        inputs.tokens.positions,
        inputs.tokens.slot_mapping,
        inputs.query_lens,
        inputs.seq_lens,
        inputs.block_table,
        inputs.draft_rows,
        inputs.draft_positions,
        shape.length,
        shape.num_places,
        shape.mask_id,
        rows.token_ids.stride(0),
        max_pages,
        page_size,
        RUNNING=int(RowStatus.RUNNING),
        WIDTH=next_power_of_2(shape.length),
        BLOCK=_BLOCK,
        **early_start(batch_rows),
    )


@jit
def _blocks_kernel(
    batch_rows,
    token_ids,
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
    block_table,
    draft_rows,
    draft_positions,
    length,
    num_places,
    mask_id,
    max_len,
    max_pages,
    page_size,
    RUNNING: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (0, i) writes the tokens of request i; all of its programs copy its pages."""
    wait_for_last(EARLY)
    let_next_start(EARLY)
    part, i = tl.program_id(0), tl.program_id(1).to(tl.int64)
    own = tl.load(batch_rows + i)
    row = own.to(tl.int64)
    pages = page_table + row * max_pages
    if part == 0:
        count = tl.load(num_tokens + row)
        runs = (tl.load(status + row) == RUNNING) & (tl.load(num_computed + row) + 1 == count)
        runs = runs & (tl.load(max_drafts + row) > 0)
        left = tl.maximum(tl.minimum(tl.load(max_total + row) - count + 1, length), 0)
        query_len = tl.where(runs, left, 0)
        idx = tl.arange(0, WIDTH)
        alive = idx < query_len
        position = tl.where(alive, count - 1 + idx, 0)
        page = tl.load(pages + position // page_size, mask=alive, other=0).to(tl.int64)
        newest = tl.load(token_ids + row * max_len + count - 1, mask=runs, other=0)
        ids = tl.where(alive, tl.where(idx == 0, newest, mask_id), 0)
        token, exists = i * length + idx, idx < length
        tl.store(input_ids + token, ids, mask=exists)
        tl.store(positions + token, position.to(tl.int64), mask=exists)
        tl.store(slot_mapping + token, tl.where(alive, page * page_size + position % page_size, -1), mask=exists)
        tl.store(query_lens + i, query_len)
        tl.store(seq_lens + i, tl.where(runs, count - 1 + query_len, 0))
        draft, is_draft = i * num_places + idx, idx < num_places
        tl.store(draft_rows + draft, tl.zeros_like(idx) + own, mask=is_draft)
        tl.store(draft_positions + draft, count + idx, mask=is_draft)
    copy_pages(pages, block_table + i * max_pages, part * BLOCK + tl.arange(0, BLOCK), max_pages)
