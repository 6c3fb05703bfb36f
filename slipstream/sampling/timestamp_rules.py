"""Timestamp rules: where a transcript may have the tokens that are times, as in openai/whisper's decoding.

Times are the last tokens of a vocabulary, in order. An output begins with one. They come in pairs, the end of a segment
and the begin of the next, except before the end of the text, and they never decrease; a segment is not empty. Where all
times together are likelier than the likeliest other token, one of them is drawn.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.columns import Column
from slipstream.device.operation import operation
from slipstream.errors import RequestError
from slipstream.kernels.triton_jit import jit, runs_triton, tl
from slipstream.parameters import Parameter, TokenIds
from slipstream.request import Request
from slipstream.sampling.operation import Positions, SamplingOperation, SamplingRows, Stage
from slipstream.values import check_vocabulary

_BLOCK, _HISTORY_BLOCK = 2048, 256


class Rules(NamedTuple):
    """The token ids that the rules need, as the parameter ``timestamp_rules`` gives them."""

    first_timestamp: int
    no_timestamps: int  # the token that asks for a transcript without times; never drawn
    end_of_text: int  # tokens below are text
    last_initial: int  # the latest time that may be the first


class TimestampHistory(NamedTuple):
    batch_rows: Tensor  # [n] int32
    positions: Tensor  # [n] int32: how many tokens come before the one to be drawn, drafts included
    token_ids: Tensor  # [num_rows, max_len] int32
    prompt_len: Tensor  # [num_rows] int32
    rules: Tensor  # [num_rows, 4] int32: ``Rules``; a row of zeros has none


@operation(like="logits")
def apply_timestamp_rules(
    logits: Tensor,  # [n, vocab]
    history: TimestampHistory,
) -> Tensor:
    if runs_triton(logits):
        return _launch(logits, history)
    out = logits.clone()
    for row, own, position in zip(out, history.batch_rows.tolist(), history.positions.tolist(), strict=True):
        rules = Rules(*history.rules[own].tolist())
        if rules.first_timestamp:
            output = history.token_ids[own, int(history.prompt_len[own]) : position].tolist()
            _apply_to_row(row, rules, output)
    return out


def _apply_to_row(logits: Tensor, rules: Rules, output: list[int]) -> None:  # [vocab]
    """Bans tokens in place, by the output before them."""
    first = rules.first_timestamp
    is_time = [token_id >= first for token_id in output]
    ends_with_time = is_time[-1:] == [True]
    is_pair = len(output) < 2 or is_time[-2]
    logits[rules.no_timestamps] = -torch.inf
    if not output:
        logits[:first] = -torch.inf
        logits[rules.last_initial + 1 :] = -torch.inf
    if any(is_time):
        last = next(token_id for token_id in reversed(output) if token_id >= first)
        # The second of a pair may equal the first; a time after text is later, so that no segment is empty.
        logits[first : last if ends_with_time else last + 1] = -torch.inf
    if ends_with_time and is_pair:
        logits[first:] = -torch.inf
    elif ends_with_time:
        logits[: rules.end_of_text] = -torch.inf
    if logits[first:].logsumexp(0) > logits[:first].amax():
        logits[:first] = -torch.inf


def _launch(logits: Tensor, history: TimestampHistory) -> Tensor:
    logits = logits.contiguous()
    out = torch.empty_like(logits)
    if len(logits):
        _timestamp_kernel[(len(logits),)](
            logits,
            history.batch_rows,
            history.positions,
            history.token_ids,
            history.token_ids.stride(0),
            history.prompt_len,
            history.rules,
            out,
            logits.shape[1],
            BLOCK=_BLOCK,
            HISTORY_BLOCK=_HISTORY_BLOCK,
            num_warps=8,
        )
    return out


@jit
def _timestamp_kernel(
    logits,
    batch_rows,
    positions,
    token_ids,
    stride,
    prompt_len,
    rules,
    out,
    size,
    BLOCK: tl.constexpr,
    HISTORY_BLOCK: tl.constexpr,
):
    row, own = tl.program_id(0).to(tl.int64), tl.load(batch_rows + tl.program_id(0)).to(tl.int64)
    logits, out, tokens, rules = logits + row * size, out + row * size, token_ids + own * stride, rules + own * 4
    first, begin, end = tl.load(rules), tl.load(prompt_len + own), tl.load(positions + row)
    last_place = tl.full([], -1, tl.int32)
    for start in range(begin, end, HISTORY_BLOCK):
        place = start + tl.arange(0, HISTORY_BLOCK)
        before = tl.load(tokens + place, mask=place < end, other=-1)
        last_place = tl.maximum(last_place, tl.max(tl.where((place < end) & (before >= first), place, -1), 0))
    last = tl.load(tokens + last_place, mask=last_place >= 0, other=0)
    ends_with_time = (last_place >= 0) & (last_place == end - 1)
    second = tl.load(tokens + end - 2, mask=end >= 2, other=0)
    is_pair = (end - begin < 2) | (second >= first)

    # What is allowed are two ranges of tokens: of text, and of times.
    lowest_text = tl.where(ends_with_time & (is_pair == 0), tl.load(rules + 2), 0)
    lowest_time = tl.where(last_place < 0, first, tl.where(ends_with_time, last, last + 1))
    highest_time = tl.where(ends_with_time & is_pair, first - 1, size - 1)
    if end <= begin:
        lowest_text = first
        highest_time = tl.minimum(highest_time, tl.load(rules + 3))
    if first == 0:  # no rules
        lowest_time, highest_time = 0, size - 1
    no_timestamps = tl.where(first == 0, -1, tl.load(rules + 1))

    # The largest text, and the sum over times, relative to the largest of them.
    best_text = tl.full([BLOCK], float("-inf"), tl.float32)
    best_time = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        is_text = (token >= lowest_text) & (token < first) & (token != no_timestamps)
        is_time = (token >= lowest_time) & (token <= highest_time)
        x = tl.load(logits + token, mask=is_text | is_time, other=float("-inf")).to(tl.float32)
        best_text = tl.maximum(best_text, tl.where(is_text, x, float("-inf")))
        best_time = tl.maximum(best_time, tl.where(is_time, x, float("-inf")))
    largest_text, largest_time = tl.max(best_text, 0), tl.max(best_time, 0)
    total = tl.zeros([BLOCK], tl.float32)
    if largest_time > float("-inf"):
        for start in range(lowest_time, highest_time + 1, BLOCK):
            token = start + tl.arange(0, BLOCK)
            x = tl.load(logits + token, mask=token <= highest_time, other=float("-inf")).to(tl.float32)
            total += tl.exp(x - largest_time)
    takes_time = largest_time + tl.log(tl.sum(total, 0)) > largest_text
    lowest_text = tl.where((largest_time > float("-inf")) & takes_time, first, lowest_text)
    for start in range(0, size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        is_text = (token >= lowest_text) & (token < first) & (token != no_timestamps)
        is_time = (token >= lowest_time) & (token <= highest_time)
        x = tl.load(logits + token, mask=token < size, other=0.0)
        tl.store(out + token, tl.where(is_text | is_time, x, float("-inf")), mask=token < size)


def _apply(logits: Tensor, rows: SamplingRows, at: Positions) -> Tensor:
    history = TimestampHistory(at.rows, at.positions, rows.token_ids, rows.prompt_len, rows["timestamp_rules"])
    return apply_timestamp_rules(logits, history)


def _check(request: Request, vocab_size: int) -> None:
    given = request.params.timestamp_rules
    check_vocabulary("timestamp_rules", given, vocab_size)
    if given and (len(given) != len(Rules._fields) or not given[2] <= given[1] < given[0] <= given[3]):
        raise RequestError(f"timestamp_rules must be the token ids {', '.join(Rules._fields)}")


OPERATION = SamplingOperation(
    "timestamp_rules",
    Stage.POSITION,
    apply=_apply,
    needed=lambda request: bool(request.params.timestamp_rules),
    parameters=(
        Parameter(
            "timestamp_rules",
            TokenIds(len(Rules._fields)),
            "Token ids of a speech model whose transcripts have times: the first time, no times, end, last first time.",
            default=(),
        ),
    ),
    columns=(
        Column(
            "timestamp_rules",
            lambda request: list(request.params.timestamp_rules or [0] * len(Rules._fields)),
            shape=(len(Rules._fields),),
        ),
    ),
    after=("logit_bias", "bad_words", "min_tokens", "suppress_tokens"),
    check=_check,
)
