"""Makes tokens that are certain the drafts of their rows: a grammar allows nothing else there.

The host knows them before it knows how many drafts the step accepts, so each run says after how many it follows.

A drafter with keys of its own that goes over the last accepted draft alone has been through the ones before when it
proposed them. It must not be given others: a run then ends with its first token that is none of those.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import operation
from slipstream.kernels.request_rows import RowState
from slipstream.kernels.triton_jit import jit, next_power_of_2, runs_triton, tl
from slipstream.plan import RowStatus


@operation(writes=("rows.token_ids", "rows.num_drafts"))
def place_certain_drafts(
    runs: Tensor,  # [num_reqs, 1 + k] int32: the drafts that must have been accepted, then tokens; -1 is none
    num_accepted: Tensor,  # [num_reqs] int32, by the step
    batch_rows: Tensor,  # [num_reqs] int32
    rows: RowState,  # written in part: drafts that differ from the run are replaced, others stay
    goes_over_last: bool,  # the drafter goes over the last accepted draft alone
) -> None:
    num_reqs, k = runs.shape[0], runs.shape[1] - 1
    if runs_triton(runs):
        _place_kernel[(num_reqs,)](
            runs,
            num_accepted,
            num_accepted.stride(0),
            batch_rows,
            rows.num_computed,
            rows.num_tokens,
            rows.max_drafts,
            rows.max_total,
            rows.status,
            rows.token_ids,
            rows.num_drafts,
            rows.token_ids.stride(0),
            k,
            RUNNING=int(RowStatus.RUNNING),
            LAST=goes_over_last,
            WIDTH=next_power_of_2(k),
            num_warps=1,
        )
        return
    own, token_ids, ids = batch_rows.long(), rows.token_ids, runs[:, 1:]
    length, num_drafts = rows.num_tokens[own], rows.num_drafts[own]
    ready = (rows.status[own] == RowStatus.RUNNING) & (rows.num_computed[own] + 1 == length)
    # There is always room for the last token, which the target samples itself.
    most = torch.minimum(rows.max_drafts[own], rows.max_total[own] - length - 1).clamp(min=0)
    given = torch.minimum((ids >= 0).int().cumprod(1).sum(1), most)
    count = torch.where(ready & (runs[:, 0] == num_accepted), given, 0).unsqueeze(1)
    idx = torch.arange(k, device=runs.device)
    slots = (length.unsqueeze(1) + idx).clamp(max=token_ids.shape[1] - 1).long()
    here = token_ids[own].gather(1, slots)
    if goes_over_last:
        is_same = (here == ids) & (idx < num_drafts.unsqueeze(1) - 1)
        count = torch.minimum(count, is_same.int().cumprod(1).sum(1, keepdim=True) + 1)
    # What comes after drafts that equal the run was proposed in the knowledge of it.
    differs = ((here != ids) & (idx < count) & (idx < num_drafts.unsqueeze(1))).any(1)
    token_ids[own.unsqueeze(1), slots] = torch.where(idx < count, ids, here)
    rows.num_drafts[own] = torch.where(differs, count[:, 0], torch.maximum(count[:, 0], num_drafts)).int()


@jit
def _place_kernel(
    runs,
    num_accepted,
    accepted_stride,
    batch_rows,
    num_computed,
    num_tokens,
    max_drafts,
    max_total,
    status,
    token_ids,
    num_drafts,
    max_len,
    k,
    RUNNING: tl.constexpr,
    LAST: tl.constexpr,
    WIDTH: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(batch_rows + i).to(tl.int64)
    length, before = tl.load(num_tokens + row), tl.load(num_drafts + row)
    ready = (tl.load(status + row) == RUNNING) & (tl.load(num_computed + row) + 1 == length)
    ready = ready & (tl.load(runs + i * (1 + k)) == tl.load(num_accepted + i * accepted_stride))
    most = tl.minimum(tl.load(max_drafts + row), tl.load(max_total + row) - length - 1)
    idx = tl.arange(0, WIDTH)
    ids = tl.load(runs + i * (1 + k) + 1 + idx, mask=idx < k, other=-1)
    given = tl.minimum(tl.min(tl.where(ids < 0, idx, WIDTH), 0), k)
    count = tl.where(ready, tl.maximum(tl.minimum(given, most), 0), 0)
    slots = token_ids + row * max_len + tl.minimum(length + idx, max_len - 1)
    here = tl.load(slots, mask=(idx < count) & (idx < before), other=-1)
    if LAST:
        num_same = tl.min(tl.where((here == ids) & (idx < count) & (idx < before - 1), WIDTH, idx), 0)
        count = tl.minimum(count, num_same + 1)
    differs = tl.max(((here != ids) & (idx < count) & (idx < before)).to(tl.int32), 0) != 0
    tl.store(slots, ids, mask=idx < count)
    tl.store(num_drafts + row, tl.where(differs, count, tl.maximum(count, before)))
