"""The end of a step on the device: rows take their sampled token, advance, and stop themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import operation, writes_only
from slipstream.kernels.triton_jit import jit, next_power_of_2, runs_triton, tl
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
    if runs_triton(batch_rows):
        num_stop_ids = stop_ids.shape[1]
        _commit_kernel[(batch_rows.shape[0],)](
            *(sampled_ids, failed, batch_rows, query_start_loc, stop_ids, max_total),
            *(token_ids, num_computed, num_tokens, status, out),
            *(token_ids.stride(0), num_stop_ids),
            RUNNING=int(RowStatus.RUNNING),
            STOPPED=int(RowStatus.STOPPED),
            LENGTH=int(RowStatus.LENGTH),
            ERROR=int(RowStatus.ERROR),
            BLOCK=next_power_of_2(num_stop_ids),
            num_warps=1,
        )
        return
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


@jit
def _commit_kernel(
    sampled_ids,
    failed,
    batch_rows,
    query_start_loc,
    stop_ids,
    max_total,
    token_ids,
    num_computed,
    num_tokens,
    status,
    out,
    max_len,
    num_stop_ids,
    RUNNING: tl.constexpr,
    STOPPED: tl.constexpr,
    LENGTH: tl.constexpr,
    ERROR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a request. Padding shares the scratch row, which does not run, so nobody writes to it."""
    i = tl.program_id(0)
    row = tl.load(batch_rows + i).to(tl.int64)
    before = tl.load(status + row)
    query_len = tl.load(query_start_loc + i + 1) - tl.load(query_start_loc + i)
    runs = (before == RUNNING) & (query_len > 0)
    computed = tl.load(num_computed + row) + query_len
    length = tl.load(num_tokens + row)
    draws = runs & (computed == length)
    bad = tl.load(failed + i) != 0
    takes = draws & (bad == 0)
    new_id = tl.load(sampled_ids + i).to(tl.int32)

    slot = tl.arange(0, BLOCK)
    stops = tl.load(stop_ids + row * num_stop_ids + slot, mask=slot < num_stop_ids, other=-1)
    stopped = tl.sum((stops == new_id).to(tl.int32), 0) > 0
    tl.store(token_ids + row * max_len + tl.minimum(length, max_len - 1), new_id, mask=takes)
    length += takes.to(tl.int32)
    after = tl.where(takes & (length >= tl.load(max_total + row)), LENGTH, before)
    after = tl.where(takes & stopped, STOPPED, after)
    after = tl.where(draws & bad, ERROR, after)
    tl.store(num_computed + row, computed, mask=runs)
    tl.store(num_tokens + row, length, mask=takes)
    tl.store(status + row, after, mask=runs)
    tl.store(out + 2 * i, tl.where(takes, new_id, -1))
    tl.store(out + 2 * i + 1, after)
