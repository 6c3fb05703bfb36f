"""Min tokens: until a row has its minimum length, no token that ends it can be drawn."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slipstream.columns import Column
from slipstream.device.operation import operation
from slipstream.errors import RequestError
from slipstream.parameters import Parameter
from slipstream.request import MAX_DEVICE_STOP_IDS, Request
from slipstream.sampling.operation import Positions, SamplingOperation, SamplingRows, Stage
from slipstream.values import Bounds


@operation(like="logits")
def hold_back_stops(
    logits: Tensor,  # [n, vocab]
    batch_rows: Tensor,  # [n] int32
    positions: Tensor,  # [n] int32: how many tokens come before the one to be drawn
    min_total: Tensor,  # [num_rows] int32: prompt and minimum output
    stop_ids: Tensor,  # [num_rows, max_stop_ids] int32, padded with -1
) -> Tensor:
    rows = batch_rows.long()
    ids = stop_ids[rows].long()
    held = (ids >= 0) & (positions < min_total[rows]).unsqueeze(1)
    banned = torch.zeros_like(logits, dtype=torch.int32)
    banned.scatter_add_(1, ids.clamp(min=0), held.int())
    return logits.masked_fill(banned > 0, float("-inf"))


def _apply(logits: Tensor, rows: SamplingRows, at: Positions) -> Tensor:
    return hold_back_stops(logits, at.rows, at.positions, rows["min_total"], rows.stop_ids)


def _min_total(request: Request) -> int:
    # Where there is a grammar the host holds ends back, since it knows where nothing else is legal.
    if request.is_constrained:
        return 0
    # A minimum beyond the limit counts as the limit, where the row ends.
    return min(len(request.prompt_token_ids) + request.params.min_tokens, request.max_total_tokens)


def _check(request: Request, _vocab_size: int) -> None:
    if request.params.min_tokens and len(request.stop_token_ids) > MAX_DEVICE_STOP_IDS:
        raise RequestError(f"min_tokens works with at most {MAX_DEVICE_STOP_IDS} stop token ids; give fewer")


OPERATION = SamplingOperation(
    "min_tokens",
    Stage.POSITION,
    apply=_apply,
    needed=lambda request: request.params.min_tokens > 0 and not request.is_constrained,
    parameters=(
        Parameter(
            "min_tokens",
            Bounds(0, math.inf, is_integer=True, may_be_none=False),
            "No end of sequence and no stop token before this many tokens.",
            default=0,
        ),
    ),
    columns=(Column("min_total", _min_total),),
    after=("logit_bias", "bad_words"),
    check=_check,
)
