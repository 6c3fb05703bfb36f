"""Writes drafts into their rows, after the tokens: the next step verifies them."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import operation
from slipstream.kernels.native.step import batch_record, compiled, in_c, rows_record
from slipstream.kernels.request_rows import RowState
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


@operation(writes=("rows.token_ids", "rows.num_drafts"))
def place_drafts(
    draft_ids: Tensor,  # [padded_reqs, k] int32; -1 and everything after it is no draft
    batch_rows: Tensor,  # [padded_reqs] int32; padding names the scratch row, which never runs
    rows: RowState,  # written in part
) -> None:
    num_reqs, k = draft_ids.shape
    if runs_triton(batch_rows):
        _place_kernel[(num_reqs,)](
            draft_ids,
            batch_rows,
            rows.num_computed,
            rows.num_tokens,
            rows.max_drafts,
            rows.max_total,
            rows.status,
            rows.token_ids,
            rows.num_drafts,
            rows.token_ids.stride(0),
            draft_ids.stride(0),
            k,
            RUNNING=int(RowStatus.RUNNING),
            WIDTH=next_power_of_2(k),
            num_warps=1,
            **early_start(batch_rows),
        )
        return
    own, token_ids = batch_rows.long(), rows.token_ids
    length = rows.num_tokens[own]
    # Only a row whose next step reaches the end of its tokens has drafts verified.
    ready = (rows.status[own] == RowStatus.RUNNING) & (rows.num_computed[own] + 1 == length)
    # There is always room for the last token, which the target samples itself.
    most = torch.minimum(rows.max_drafts[own], rows.max_total[own] - length - 1)
    given = (draft_ids >= 0).int().cumprod(1).sum(1)
    count = torch.where(ready, torch.minimum(most, given).clamp(min=0), 0).int()
    for j in range(k):
        slot = (length + j).clamp(max=token_ids.shape[1] - 1).long()
        token_ids[own, slot] = torch.where(j < count, draft_ids[:, j], token_ids[own, slot])
    rows.num_drafts[own] = torch.where(ready, count, rows.num_drafts[own])


@in_c(place_drafts)
def _place_in_c(draft_ids: Tensor, batch_rows: Tensor, rows: RowState) -> None:
    drafts = (draft_ids.data_ptr(), draft_ids.stride(0), draft_ids.shape[1])
    compiled().slip_place_drafts(rows_record(rows), batch_record(batch_rows), *drafts)


@jit
def _place_kernel(
    draft_ids,
    batch_rows,
    num_computed,
    num_tokens,
    max_drafts,
    max_total,
    status,
    token_ids,
    num_drafts,
    max_len,
    stride,
    k,
    RUNNING: tl.constexpr,
    WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_last(EARLY)
    let_next_start(EARLY)
    i = tl.program_id(0)
    row = tl.load(batch_rows + i).to(tl.int64)
    length = tl.load(num_tokens + row)
    ready = (tl.load(status + row) == RUNNING) & (tl.load(num_computed + row) + 1 == length)
    most = tl.minimum(tl.load(max_drafts + row), tl.load(max_total + row) - length - 1)
    idx = tl.arange(0, WIDTH)
    ids = tl.load(draft_ids + i.to(tl.int64) * stride + idx, mask=idx < k, other=-1)
    given = tl.min(tl.where(ids < 0, idx, WIDTH), 0)
    count = tl.where(ready, tl.maximum(tl.minimum(tl.minimum(most, given), k), 0), 0)
    tl.store(token_ids + row * max_len + tl.minimum(length + idx, max_len - 1), ids, mask=idx < count)
    tl.store(num_drafts + row, count, mask=ready)
