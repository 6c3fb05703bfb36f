"""Min-p: tokens less likely than this share of the likeliest one are dropped."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.columns import Column
from slipstream.device.operation import operation
from slipstream.parameters import Parameter
from slipstream.sampling.operation import SamplingOperation, Stage, is_sampled
from slipstream.values import Bounds


@operation(like="logits")
def apply_min_p(
    logits: Tensor,  # [n, vocab]
    min_p: Tensor,  # [n] float32; 0 turns it off
) -> Tensor:
    # p >= min_p * p_max is a condition on differences of logits, so no softmax is needed; log(0) is -inf: all stay.
    threshold = logits.amax(1, keepdim=True) + torch.log(min_p).unsqueeze(1)
    return logits.masked_fill(logits < threshold, float("-inf"))


OPERATION = SamplingOperation(
    "min_p",
    Stage.DISTRIBUTION,
    apply=lambda logits, rows, at: apply_min_p(logits, rows["min_p"][at.rows]),
    needed=lambda request: is_sampled(request) and bool(request.params.min_p),
    parameters=(
        Parameter(
            "min_p",
            Bounds(0.0, 1.0),
            "Drop tokens less likely than this share of the likeliest one; 0 is off.",
            fallback=0.0,
        ),
    ),
    columns=(Column("min_p", lambda request: request.params.min_p, "float32"),),
    after=("top_k", "top_p"),
)
