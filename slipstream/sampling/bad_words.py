"""Bad words: a token that would complete a forbidden sequence is banned."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.columns import Column
from slipstream.device.operation import operation
from slipstream.parameters import Parameter, Texts
from slipstream.request import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, Request
from slipstream.sampling.operation import Positions, SamplingOperation, SamplingRows, Stage
from slipstream.sampling_params import MAX_STOP_LENGTH


@operation(like="logits")
def ban_bad_words(
    logits: Tensor,  # [n, vocab]
    batch_rows: Tensor,  # [n] int32
    token_ids: Tensor,  # [num_rows, max_len] int32
    positions: Tensor,  # [n] int32: how many tokens come before the one to be drawn
    num_bad_words: Tensor,  # [num_rows] int32
    bad_words: Tensor,  # [num_rows, max_words, max_tokens] int32, each at the right end, -1 before it
) -> Tensor:
    rows = batch_rows.long()
    sequences = bad_words[rows]
    counts = torch.arange(sequences.shape[1], device=logits.device) < num_bad_words[rows].unsqueeze(1)
    num_before = sequences.shape[2] - 1
    position = positions.long().unsqueeze(1) - num_before + torch.arange(num_before, device=logits.device)
    tail = token_ids[rows.unsqueeze(1), position.clamp(min=0)]
    tail = torch.where(position >= 0, tail, -2)  # equal to no token and to no padding
    begins = sequences[:, :, :-1]
    complete = ((begins == -1) | (begins == tail.unsqueeze(1))).all(2) & counts
    banned = torch.zeros_like(logits, dtype=torch.int32)
    banned.scatter_add_(1, torch.where(complete, sequences[:, :, -1], 0).long(), complete.int())
    return logits.masked_fill(banned > 0, float("-inf"))


def _apply(logits: Tensor, rows: SamplingRows, at: Positions) -> Tensor:
    return ban_bad_words(logits, at.rows, rows.token_ids, at.positions, rows["num_bad_words"], rows["bad_words"])


def _right_aligned(request: Request) -> list[int]:
    sequences = request.bad_word_ids
    return [token_id for ids in sequences for token_id in (*[-1] * (MAX_BAD_WORD_TOKENS - len(ids)), *ids)]


OPERATION = SamplingOperation(
    "bad_words",
    Stage.POSITION,
    apply=_apply,
    needed=lambda request: bool(request.bad_word_ids),
    parameters=(
        Parameter(
            "bad_words",
            Texts(MAX_BAD_WORDS, MAX_STOP_LENGTH),
            "Never generate this text; may be given several times.",
            default=(),
        ),
    ),
    columns=(
        Column("num_bad_words", lambda request: len(request.bad_word_ids)),
        Column("bad_words", _right_aligned, shape=(MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS)),
    ),
    after=("logit_bias",),
)
