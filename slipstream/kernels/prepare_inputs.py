"""From request rows to the inputs of a forward pass, on the device.

The host knows how many query tokens each request has, but not which tokens, nor the exact length: a step in flight may
still change both. A row that stopped by itself since the plan was made contributes dead tokens: token 0 at position 0,
nothing written to the cache, sequence length 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import operation, writes_only
from slipstream.kernels.triton_jit import jit, runs_triton, tl
from slipstream.types import RowStatus

_BLOCK = 1024


@operation(
    writes_only,
    writes=("input_ids", "positions", "slot_mapping", "seq_lens", "last_token_indices", "block_table"),
)
def prepare_inputs(
    batch_rows: Tensor,  # [padded_reqs] int32; padding names the scratch row, which never runs
    query_start_loc: Tensor,  # [padded_reqs + 1] int32; padding repeats the last value
    token_ids: Tensor,  # [num_rows, max_len] int32
    page_table: Tensor,  # [num_rows, max_pages] int32
    num_computed: Tensor,  # [num_rows] int32
    num_tokens: Tensor,  # [num_rows] int32
    status: Tensor,  # [num_rows] int32
    page_size: int,
    # written, each up to its padded size:
    input_ids: Tensor,  # [padded_tokens] int32
    positions: Tensor,  # [padded_tokens] int64
    slot_mapping: Tensor,  # [padded_tokens] int64
    seq_lens: Tensor,  # [padded_reqs] int32
    last_token_indices: Tensor,  # [padded_reqs] int64
    block_table: Tensor,  # [padded_reqs, max_pages] int32
) -> None:
    if runs_triton(batch_rows):
        num_reqs, max_pages = block_table.shape
        num_tokens_padded = input_ids.shape[0]
        # Blocks of a request share its tokens and its pages; the last row of programs fills the padding.
        num_blocks = -(-max(max_pages, min(num_tokens_padded, 4 * _BLOCK)) // _BLOCK)
        _prepare_kernel[(num_blocks, num_reqs + 1)](
            *(batch_rows, query_start_loc, token_ids, page_table, num_computed, num_tokens, status),
            *(input_ids, positions, slot_mapping, seq_lens, last_token_indices, block_table),
            *(num_reqs, num_tokens_padded, token_ids.stride(0), max_pages, page_size),
            RUNNING=int(RowStatus.RUNNING),
            BLOCK=_BLOCK,
        )
        return
    rows = batch_rows.long()
    query_lens = query_start_loc.diff()
    runs = (status[rows] == RowStatus.RUNNING) & (query_lens > 0)
    seq_lens.copy_(torch.where(runs, num_computed[rows] + query_lens, 0))
    last_token_indices.copy_(torch.where(query_lens > 0, query_start_loc[1:] - 1, 0))
    torch.index_select(page_table, 0, rows, out=block_table)

    # Which request each token belongs to; padding tokens come after all of them.
    total = int(query_start_loc[-1])
    request = torch.repeat_interleave(query_lens, output_size=total)
    row = rows[request]
    position = num_computed[row] + torch.arange(total, dtype=torch.int32) - query_start_loc[request]
    alive = runs[request] & (position < num_tokens[row])
    position = torch.where(alive, position, 0).long()
    input_ids[:total] = torch.where(alive, token_ids[row, position], 0)
    positions[:total] = position
    page_id = page_table[row, position // page_size].long()
    slot_mapping[:total] = torch.where(alive, page_id * page_size + position % page_size, -1)
    input_ids[total:] = 0
    positions[total:] = 0
    slot_mapping[total:] = -1


@jit
def _prepare_kernel(
    batch_rows,
    query_start_loc,
    token_ids,
    page_table,
    num_computed,
    num_tokens,
    status,
    input_ids,
    positions,
    slot_mapping,
    seq_lens,
    last_token_indices,
    block_table,
    num_reqs,
    num_tokens_padded,
    max_len,
    max_pages,
    page_size,
    RUNNING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block, i, stride = tl.program_id(0), tl.program_id(1), tl.num_programs(0) * BLOCK
    slot = block * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(query_start_loc + i)
    if i == num_reqs:
        # Behind the last request's tokens.
        for at in range(start, num_tokens_padded, stride):
            exists = at + slot < num_tokens_padded
            tl.store(input_ids + at + slot, 0, mask=exists)
            tl.store(positions + at + slot, 0, mask=exists)
            tl.store(slot_mapping + at + slot, -1, mask=exists)
    else:
        row = tl.load(batch_rows + i).to(tl.int64)
        query_len = tl.load(query_start_loc + i + 1) - start
        computed = tl.load(num_computed + row)
        length = tl.load(num_tokens + row)
        runs = (tl.load(status + row) == RUNNING) & (query_len > 0)
        if block == 0:
            tl.store(seq_lens + i, tl.where(runs, computed + query_len, 0))
            tl.store(last_token_indices + i, tl.where(query_len > 0, start + query_len - 1, 0))
        is_page = slot < max_pages
        pages = tl.load(page_table + row * max_pages + slot, mask=is_page, other=0)
        tl.store(block_table + i.to(tl.int64) * max_pages + slot, pages, mask=is_page)
        for at in range(0, query_len, stride):
            exists = at + slot < query_len
            position = computed + at + slot
            alive = exists & runs & (position < length)
            position = tl.where(alive, position, 0)
            token = start + at + slot
            ids = tl.load(token_ids + row * max_len + position, mask=alive, other=0)
            page = tl.load(page_table + row * max_pages + position // page_size, mask=alive, other=0).to(tl.int64)
            tl.store(input_ids + token, ids, mask=exists)
            tl.store(positions + token, position.to(tl.int64), mask=exists)
            place = page * page_size + position % page_size
            tl.store(slot_mapping + token, tl.where(alive, place, -1), mask=exists)
