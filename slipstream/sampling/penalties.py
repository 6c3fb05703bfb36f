"""Repetition, frequency and presence penalties.

Counts are computed from the row's own tokens at every step. No counters have to be kept consistent under preemption and
rejected drafts, and a few thousand integers are read where the model reads gigabytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.columns import Column
from slipstream.device.operation import operation
from slipstream.kernels.triton_jit import jit, runs_triton, tl
from slipstream.parameters import Parameter
from slipstream.request import Request
from slipstream.sampling.operation import Positions, SamplingOperation, SamplingRows, Stage
from slipstream.values import Bounds

# Programs that share the counting of one row, and the tokens each reads at a time.
_SHARES, _CHUNK = 16, 1024
_BLOCK = 2048


@operation(like="logits")
def apply_penalties(
    logits: Tensor,  # [n, vocab]
    batch_rows: Tensor,  # [n] int32
    token_ids: Tensor,  # [num_rows, max_len] int32
    positions: Tensor,  # [n] int32: how many tokens come before the one to be drawn, drafts included
    prompt_len: Tensor,  # [num_rows] int32
    repetition: Tensor,  # [num_rows] float32; 1 is off
    frequency: Tensor,  # [num_rows] float32; 0 is off
    presence: Tensor,  # [num_rows] float32; 0 is off
) -> Tensor:
    if runs_triton(logits):
        return _launch(logits, batch_rows, token_ids, positions, prompt_len, repetition, frequency, presence)
    rows = batch_rows.long()
    length = positions.unsqueeze(1)
    longest = max(1, int(length.max()))
    history = token_ids[rows, :longest].long()
    position = torch.arange(longest)
    exists = position < length
    is_output = exists & (position >= prompt_len[rows].unsqueeze(1))
    # Slots beyond a row's tokens hold values of its previous request; they are not counted.
    counts = torch.zeros(logits.shape, dtype=torch.int32)
    seen = counts.scatter_add(1, history, exists.int()) > 0
    counts.scatter_add_(1, history, is_output.int())

    factor = repetition[rows].unsqueeze(1).to(logits.dtype)
    logits = torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
    logits = logits - frequency[rows].unsqueeze(1) * counts
    return logits - presence[rows].unsqueeze(1) * (counts > 0)


def _launch(
    logits: Tensor,
    batch_rows: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    prompt_len: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> Tensor:
    logits = logits.contiguous()
    n, vocab_size = logits.shape
    out = torch.empty_like(logits)
    if n == 0:
        return out
    counts = torch.zeros(n, vocab_size, dtype=torch.int32, device=logits.device)
    factors = (repetition, frequency, presence)
    _count_kernel[(n, _SHARES)](
        batch_rows,
        token_ids,
        token_ids.stride(0),
        positions,
        prompt_len,
        *factors,
        counts,
        vocab_size,
        SHARES=_SHARES,
        CHUNK=_CHUNK,
        num_warps=4,
    )
    _penalty_kernel[(n, -(-vocab_size // _BLOCK))](
        logits, batch_rows, *factors, counts, out, vocab_size, BLOCK=_BLOCK, num_warps=4
    )
    return out


@jit
def _count_kernel(
    batch_rows,
    token_ids,
    stride,
    positions,
    prompt_len,
    repetition,
    frequency,
    presence,
    counts,
    vocab_size,
    SHARES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """How often each token occurs in a row's output, and in bit 30 whether it occurs in the prompt."""
    row, own = tl.program_id(0).to(tl.int64), tl.load(batch_rows + tl.program_id(0)).to(tl.int64)
    counts_in_row = counts + row * vocab_size
    length, first_output = tl.load(positions + row), tl.load(prompt_len + own)
    shifts = (tl.load(frequency + own) != 0) | (tl.load(presence + own) != 0)
    if shifts | (tl.load(repetition + own) != 1):
        for start in range(tl.program_id(1) * CHUNK, length, SHARES * CHUNK):
            position = start + tl.arange(0, CHUNK)
            token = tl.load(token_ids + own * stride + position, mask=position < length, other=-1)
            exists = (token >= 0) & (token < vocab_size)
            is_output = position >= first_output
            tl.atomic_add(counts_in_row + token, 1, mask=exists & is_output, sem="relaxed")
            tl.atomic_or(counts_in_row + token, 1 << 30, mask=exists & (position < first_output), sem="relaxed")


@jit
def _penalty_kernel(logits, batch_rows, repetition, frequency, presence, counts, out, vocab_size, BLOCK: tl.constexpr):
    row, own = tl.program_id(0).to(tl.int64), tl.load(batch_rows + tl.program_id(0)).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = token < vocab_size
    seen = tl.load(counts + row * vocab_size + token, mask=exists, other=0)
    x = tl.load(logits + row * vocab_size + token, mask=exists, other=0.0).to(tl.float32)
    factor = tl.load(repetition + own)
    x = tl.where(seen > 0, tl.where(x > 0, x / factor, x * factor), x)
    count = (seen & ((1 << 30) - 1)).to(tl.float32)
    x = x - tl.load(frequency + own) * count - tl.where(count > 0, tl.load(presence + own), 0.0)
    tl.store(out + row * vocab_size + token, x.to(out.dtype.element_ty), mask=exists)


def _apply(logits: Tensor, rows: SamplingRows, at: Positions) -> Tensor:
    history = (rows.token_ids, at.positions, rows.prompt_len)
    return apply_penalties(logits, at.rows, *history, rows["repetition"], rows["frequency"], rows["presence"])


def _is_needed(request: Request) -> bool:
    params = request.params
    repeats = params.repetition_penalty not in (None, 1.0)
    return repeats or bool(params.frequency_penalty) or bool(params.presence_penalty)


_SUBTRACTED = Bounds(-2.0, 2.0, may_be_none=False)
OPERATION = SamplingOperation(
    "penalties",
    Stage.HISTORY,
    apply=_apply,
    needed=_is_needed,
    parameters=(
        Parameter(
            "presence_penalty", _SUBTRACTED, "Subtracted from the logits of tokens already in the output.", default=0.0
        ),
        Parameter(
            "frequency_penalty",
            _SUBTRACTED,
            "Subtracted for each time a token is already in the output.",
            default=0.0,
        ),
        Parameter(
            "repetition_penalty",
            Bounds(0.0, 100.0, is_low_open=True),
            "Divides the logits of tokens in prompt and output, multiplies negative ones; 1 is off.",
            fallback=1.0,
        ),
    ),
    columns=(
        Column("repetition", lambda request: request.params.repetition_penalty, "float32"),
        Column("frequency", lambda request: request.params.frequency_penalty, "float32"),
        Column("presence", lambda request: request.params.presence_penalty, "float32"),
    ),
)
