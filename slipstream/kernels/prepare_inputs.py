"""From request rows to the inputs of a forward pass, on the device.

The host knows how many query tokens each request has, but not which tokens, nor the exact length: a step in flight may
still change both. A row that stopped by itself since the plan was made contributes dead tokens: token 0 at position 0,
nothing written to the cache, sequence length 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import operation, writes_only
from slipstream.types import RowStatus


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
