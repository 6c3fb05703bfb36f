"""Suppressed tokens: never drawn, or not as the first of an output."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.columns import Column
from slipstream.device.operation import operation
from slipstream.kernels.triton_jit import jit, runs_triton, tl
from slipstream.parameters import Parameter, TokenIds
from slipstream.request import Request
from slipstream.sampling.operation import Positions, SamplingOperation, SamplingRows, Stage
from slipstream.values import check_vocabulary

MAX_SUPPRESSED, MAX_SUPPRESSED_AT_BEGIN = 256, 16
_BLOCK = 1024


@operation(like="logits")
def suppress_tokens(
    logits: Tensor,  # [n, vocab]
    batch_rows: Tensor,  # [n] int32
    positions: Tensor,  # [n] int32: how many tokens come before the one to be drawn
    prompt_len: Tensor,  # [num_rows] int32
    counts: Tensor,  # [num_rows, 2] int32: how many entries of the next two count
    suppressed: Tensor,  # [num_rows, MAX_SUPPRESSED] int32
    at_begin: Tensor,  # [num_rows, MAX_SUPPRESSED_AT_BEGIN] int32
) -> Tensor:
    if runs_triton(logits):
        return _launch(logits, batch_rows, positions, prompt_len, counts, suppressed, at_begin)
    rows = batch_rows.long()
    is_first = (positions <= prompt_len[rows]).unsqueeze(1)
    always, first = counts[rows].unsqueeze(2).unbind(1)
    idx = torch.arange(suppressed.shape[1], device=logits.device)
    is_banned = torch.cat([idx < always, (idx[: at_begin.shape[1]] < first) & is_first], 1)
    ids = torch.cat([suppressed[rows], at_begin[rows]], 1)
    limit = torch.where(is_banned, -torch.inf, torch.inf).to(logits.dtype)
    return logits.scatter_reduce(1, torch.where(is_banned, ids, 0).long(), limit, "amin")


def _launch(
    logits: Tensor,
    batch_rows: Tensor,
    positions: Tensor,
    prompt_len: Tensor,
    counts: Tensor,
    suppressed: Tensor,
    at_begin: Tensor,
) -> Tensor:
    logits = logits.contiguous()
    out = torch.empty_like(logits)
    if len(logits):
        _suppress_kernel[(len(logits),)](
            logits,
            batch_rows,
            positions,
            prompt_len,
            counts,
            suppressed,
            at_begin,
            out,
            logits.shape[1],
            WIDTH=suppressed.shape[1],
            BEGIN_WIDTH=at_begin.shape[1],
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return out


@jit
def _suppress_kernel(
    logits,
    batch_rows,
    positions,
    prompt_len,
    counts,
    suppressed,
    at_begin,
    out,
    size,
    WIDTH: tl.constexpr,
    BEGIN_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, own = tl.program_id(0).to(tl.int64), tl.load(batch_rows + tl.program_id(0)).to(tl.int64)
    logits, out = logits + row * size, out + row * size
    for start in range(0, size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        tl.store(out + token, tl.load(logits + token, mask=token < size), mask=token < size)
    tl.debug_barrier()  # what is banned below was written above, by other threads
    is_first = tl.load(positions + row) <= tl.load(prompt_len + own)
    _ban(out, suppressed + own * WIDTH, tl.load(counts + own * 2), WIDTH)
    _ban(out, at_begin + own * BEGIN_WIDTH, tl.where(is_first, tl.load(counts + own * 2 + 1), 0), BEGIN_WIDTH)


@jit
def _ban(out, ids, count, WIDTH: tl.constexpr):
    idx = tl.arange(0, WIDTH)
    token = tl.load(ids + idx, mask=idx < count, other=0)
    tl.store(out + token, tl.full([WIDTH], float("-inf"), tl.float32).to(out.dtype.element_ty), mask=idx < count)


def _apply(logits: Tensor, rows: SamplingRows, at: Positions) -> Tensor:
    ids = (rows["num_suppressed"], rows["suppressed"], rows["suppressed_at_begin"])
    return suppress_tokens(logits, at.rows, at.positions, rows.prompt_len, *ids)


def _both(request: Request) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return request.params.suppress_tokens, request.params.begin_suppress_tokens


def _check(request: Request, vocab_size: int) -> None:
    check_vocabulary("suppress_tokens", request.params.suppress_tokens, vocab_size)
    check_vocabulary("begin_suppress_tokens", request.params.begin_suppress_tokens, vocab_size)


OPERATION = SamplingOperation(
    "suppress_tokens",
    Stage.POSITION,
    apply=_apply,
    needed=lambda request: any(_both(request)),
    parameters=(
        Parameter(
            "suppress_tokens",
            TokenIds(MAX_SUPPRESSED),
            "Never generate this token id; may be given several times.",
            default=(),
        ),
        Parameter(
            "begin_suppress_tokens",
            TokenIds(MAX_SUPPRESSED_AT_BEGIN),
            "Do not begin the output with this token id; may be given several times.",
            default=(),
        ),
    ),
    columns=(
        Column("num_suppressed", lambda request: list(map(len, _both(request))), shape=(2,)),
        Column("suppressed", lambda request: request.params.suppress_tokens, shape=(MAX_SUPPRESSED,)),
        Column(
            "suppressed_at_begin",
            lambda request: request.params.begin_suppress_tokens,
            shape=(MAX_SUPPRESSED_AT_BEGIN,),
        ),
    ),
    after=("logit_bias", "bad_words", "min_tokens"),
    check=_check,
)
