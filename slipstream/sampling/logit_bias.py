"""Logit bias: a number added to chosen tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.columns import Column
from slipstream.device.operation import operation
from slipstream.parameters import Parameter, TokenNumbers
from slipstream.request import Request
from slipstream.sampling.operation import Positions, SamplingOperation, SamplingRows, Stage
from slipstream.values import check_vocabulary

MAX_LOGIT_BIAS = 300


@operation(like="logits")
def apply_logit_bias(
    logits: Tensor,  # [n, vocab]
    batch_rows: Tensor,  # [n] int32
    num_bias: Tensor,  # [num_rows] int32: how many entries of the next two count
    bias_ids: Tensor,  # [num_rows, max_bias] int32
    bias_values: Tensor,  # [num_rows, max_bias] float32
) -> Tensor:
    rows = batch_rows.long()
    counts = torch.arange(bias_ids.shape[1], device=logits.device) < num_bias[rows].unsqueeze(1)
    ids = torch.where(counts, bias_ids[rows].long(), 0)
    values = torch.where(counts, bias_values[rows], 0.0).to(logits.dtype)
    return logits.scatter_add(1, ids, values)


def _apply(logits: Tensor, rows: SamplingRows, at: Positions) -> Tensor:
    return apply_logit_bias(logits, at.rows, rows["num_bias"], rows["bias_ids"], rows["bias_values"])


def _check(request: Request, vocab_size: int) -> None:
    check_vocabulary("logit_bias", tuple(request.params.logit_bias or ()), vocab_size)


OPERATION = SamplingOperation(
    "logit_bias",
    Stage.POSITION,
    apply=_apply,
    needed=lambda request: bool(request.params.logit_bias),
    parameters=(
        Parameter("logit_bias", TokenNumbers(MAX_LOGIT_BIAS), 'Added to logits, as JSON: {"token id": number}.'),
    ),
    columns=(
        Column("num_bias", lambda request: len(request.params.logit_bias or ())),
        Column("bias_ids", lambda request: list(request.params.logit_bias or ()), shape=(MAX_LOGIT_BIAS,)),
        Column(
            "bias_values",
            lambda request: list((request.params.logit_bias or {}).values()),
            "float32",
            shape=(MAX_LOGIT_BIAS,),
        ),
    ),
    check=_check,
)
