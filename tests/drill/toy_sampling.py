"""A sampling operation that the package does not know, in one file: ``clock_push``.

A token's class is its id, its predecessor's id and its position together, modulo ``clock_size``. Tokens whose class is
one of ``clock_classes`` have ``clock_push`` added to their logit. What is added depends on the token before, so a draft
that is verified with a history other than its own is verified wrongly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.columns import Column
from slipstream.device.operation import operation
from slipstream.errors import RequestError
from slipstream.parameters import Parameter, TokenIds
from slipstream.request import Request
from slipstream.sampling.operation import Positions, SamplingOperation, SamplingRows, Stage
from slipstream.sampling_params import value_of
from slipstream.values import Bounds

MOST_CLASSES = 3
SIZE = Parameter("clock_size", Bounds(0, 64, is_integer=True, may_be_none=False), "Number of classes; 0 is off.", 0)
PUSH = Parameter("clock_push", Bounds(-100.0, 100.0, may_be_none=False), "Added to the logit.", -100.0)
CLASSES = Parameter("clock_classes", TokenIds(MOST_CLASSES), "Which classes.", (0,))


def classes_of(token_ids: Tensor, before: Tensor, positions: Tensor, size: Tensor) -> Tensor:
    return (token_ids + before + positions) % size


@operation(like="logits")
def push_by_clock(
    logits: Tensor,  # [n, vocab]
    batch_rows: Tensor,  # [n] int32
    token_ids: Tensor,  # [num_rows, max_len] int32
    positions: Tensor,  # [n] int32
    size: Tensor,  # [num_rows] int32; 0 turns it off
    push: Tensor,  # [num_rows] float32
    num_classes: Tensor,  # [num_rows] int32
    classes: Tensor,  # [num_rows, MOST_CLASSES] int32
) -> Tensor:
    rows, at = batch_rows.long(), positions.long()
    before = token_ids[rows, (at - 1).clamp(min=0)].unsqueeze(1)
    vocabulary, modulus = torch.arange(logits.shape[1]).unsqueeze(0), size[rows].clamp(min=1).unsqueeze(1)
    own = classes_of(vocabulary, before, at.unsqueeze(1), modulus)
    exists = torch.arange(classes.shape[1]) < num_classes[rows].unsqueeze(1)
    is_pushed = ((own.unsqueeze(2) == classes[rows].unsqueeze(1)) & exists.unsqueeze(1)).any(2)
    is_pushed &= (size[rows] > 0).unsqueeze(1)
    return logits + torch.where(is_pushed, push[rows].unsqueeze(1), 0.0).to(logits.dtype)


def _apply(logits: Tensor, rows: SamplingRows, at: Positions) -> Tensor:
    own = (rows["clock_size"], rows["clock_push"], rows["num_clock_classes"], rows["clock_classes"])
    return push_by_clock(logits, at.rows, rows.token_ids, at.positions, *own)


def _check(request: Request, vocab_size: int) -> None:
    if value_of(request.params, SIZE) >= vocab_size:
        raise RequestError(f"clock_size must be below the vocabulary's {vocab_size}")


OPERATION = SamplingOperation(
    "clock",
    Stage.HISTORY,
    apply=_apply,
    needed=lambda request: value_of(request.params, SIZE) > 0,
    parameters=(SIZE, PUSH, CLASSES),
    columns=(
        Column("clock_size", lambda request: value_of(request.params, SIZE)),
        Column("clock_push", lambda request: value_of(request.params, PUSH), "float32"),
        Column("num_clock_classes", lambda request: len(value_of(request.params, CLASSES))),
        Column("clock_classes", lambda request: value_of(request.params, CLASSES), shape=(MOST_CLASSES,)),
    ),
    after=("penalties",),
    check=_check,
)
