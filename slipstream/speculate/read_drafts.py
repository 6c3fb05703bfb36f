"""The drafts of rows for the host: who fills masks for the next step must know what it will verify."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import operation
from slipstream.kernels.request_rows import RowState
from slipstream.kernels.triton_jit import jit, next_power_of_2, runs_triton, tl


@operation(writes=("out",))
def read_drafts(
    rows: RowState,
    batch_rows: Tensor,  # [num_reqs] int32
    out: Tensor,  # written: [num_reqs, k] int32; -1 where there is no draft
) -> None:
    num_reqs, k = out.shape
    if runs_triton(out):
        _read_kernel[(num_reqs,)](
            batch_rows,
            rows.num_tokens,
            rows.num_drafts,
            rows.token_ids,
            rows.token_ids.stride(0),
            out,
            k,
            WIDTH=next_power_of_2(k),
            num_warps=1,
        )
        return
    own, idx = batch_rows.long(), torch.arange(k, device=out.device)
    slots = (rows.num_tokens[own].unsqueeze(1) + idx).clamp(max=rows.token_ids.shape[1] - 1).long()
    found = rows.token_ids[own].gather(1, slots)
    out.copy_(torch.where(idx < rows.num_drafts[own].unsqueeze(1), found, -1))


@jit
def _read_kernel(batch_rows, num_tokens, num_drafts, token_ids, max_len, out, k, WIDTH: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(batch_rows + i).to(tl.int64)
    idx = tl.arange(0, WIDTH)
    length, count = tl.load(num_tokens + row), tl.load(num_drafts + row)
    found = tl.load(token_ids + row * max_len + length + idx, mask=(idx < count) & (idx < k), other=-1)
    tl.store(out + i * k + idx, found, mask=idx < k)
