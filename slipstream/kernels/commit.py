"""The end of a step on the device: rows take their sampled token, advance, and stop themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import operation, writes_only
from slipstream.types import RowStatus


@operation(writes_only, writes=("token_ids", "num_computed", "num_tokens", "status", "out"))
def commit(
    sampled_ids: Tensor,  # [padded_reqs] int64
    failed: Tensor,  # [padded_reqs] bool: the logits held no usable number
    batch_rows: Tensor,  # [padded_reqs] int32; padding names the scratch row, which never runs
    query_start_loc: Tensor,  # [padded_reqs + 1] int32
    stop_ids: Tensor,  # [num_rows, max_stop_ids] int32, padded with -1
    max_total: Tensor,  # [num_rows] int32
    # written:
    token_ids: Tensor,  # [num_rows, max_len] int32
    num_computed: Tensor,  # [num_rows] int32
    num_tokens: Tensor,  # [num_rows] int32
    status: Tensor,  # [num_rows] int32
    out: Tensor,  # [padded_reqs, 2] int32: new token or -1, status
) -> None:
    rows = batch_rows.long()
    runs = status[rows] == RowStatus.RUNNING
    query_lens = query_start_loc.diff()
    computed = num_computed[rows] + torch.where(runs, query_lens, 0)
    length = num_tokens[rows]
    # A prompt chunk that ends before the last known token draws nothing.
    draws = runs & (query_lens > 0) & (computed == length)
    takes = draws & ~failed
    new_ids = sampled_ids.to(torch.int32)

    slots = length.clamp(max=token_ids.shape[1] - 1).long()
    token_ids[rows, slots] = torch.where(takes, new_ids, token_ids[rows, slots])
    length = length + takes.int()
    stopped = (stop_ids[rows] == new_ids.unsqueeze(1)).any(1)

    after = status[rows]
    after = torch.where(takes & (length >= max_total[rows]), int(RowStatus.LENGTH), after)
    after = torch.where(takes & stopped, int(RowStatus.STOPPED), after)
    after = torch.where(draws & failed, int(RowStatus.ERROR), after)
    num_computed[rows] = computed
    num_tokens[rows] = length
    status[rows] = after
    out[:, 0] = torch.where(takes, new_ids, -1)
    out[:, 1] = after
