"""Rows: the device's state of each request, and the assignment of a batch's tokens to requests.

The layers whose state is not a page of keys describe a batch by four tensors, one number a request: the slot of its
state, the row of its first token, how many tokens it has, and the position of the first one (``RequestStates``). The
order is that of ``query_start_loc``: starts ascend, and the tokens of one request end before the next one starts. Rows
between them, and after the last, are padding. A request without tokens, as padding has none, touches nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.triton_jit import jit, tl


class RequestStates(NamedTuple):
    """Which states a pass goes on from, and which of its tokens belong to them."""

    slots: Tensor  # [num_reqs] int32: the slot of a request's state
    starts: Tensor  # [num_reqs] int32: the row of its first token
    counts: Tensor  # [num_reqs] int32: its tokens in use
    positions: Tensor  # [num_reqs] int32 or int64: of the first one


@dataclass(frozen=True, slots=True)
class RowState:
    """The device's state of every running request, by row. Shapes are [num_rows] int32 unless noted otherwise.

    The last row is scratch: it never runs, and padding names it.
    """

    token_ids: Tensor  # [num_rows, max_len] int32; drafts follow a row's tokens
    page_table: Tensor  # [num_rows, max_pages] int32
    num_computed: Tensor
    num_tokens: Tensor
    num_drafts: Tensor  # draft tokens after the row's tokens
    max_drafts: Tensor  # maximum draft length of the request; 0: none are proposed
    max_total: Tensor
    status: Tensor  # RowStatus
    step_start: Tensor  # 1 + the first position that the last step computed, even if the row ended with it; 0: none
    stop_ids: Tensor  # [num_rows, max_stop_ids] int32, padded with -1
    temperature: Tensor  # float32; rows at 0 are greedy
    seeds: Tensor  # [num_rows, 2] int32
    choice: Tensor
    # The slots of the row that hold the drafter's keys without a gap: from here, up to here.
    draft_start: Tensor
    draft_end: Tensor


class EncoderPages(NamedTuple):
    """Of every row: where the output of its request's encoder is, in pages of a table of its own."""

    page_table: Tensor  # [num_rows, max_encoder_pages] int32
    lens: Tensor  # [num_rows] int32: entries


def used_rows(starts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each token of a request: its row, its request, and its number in it."""
    counts = counts.long()
    request = torch.repeat_interleave(torch.arange(counts.shape[0], device=counts.device), counts)
    number = torch.arange(request.shape[0], device=counts.device) - (counts.cumsum(0) - counts)[request]
    return starts.long()[request] + number, request, number


@jit
def describe(requests, request, num_reqs):
    """Slot, first row, number of tokens and first position; outside of the batch there are none.

    Read before the kernel in front has ended: it is not that one which writes them.
    """
    slots, starts, counts, positions = requests
    exists = (request >= 0) & (request < num_reqs)
    slot = tl.load(slots + request, mask=exists, other=0, cache_modifier=".cg").to(tl.int64)
    start = tl.load(starts + request, mask=exists, other=0, cache_modifier=".cg").to(tl.int64)
    count = tl.load(counts + request, mask=exists, other=0, cache_modifier=".cg")
    position = tl.load(positions + request, mask=exists, other=0, cache_modifier=".cg").to(tl.int32)
    return slot, start, count, position


@jit
def gap_before(requests, request, num_reqs, num_tokens):
    """The padding rows before a request: first and end. The request after the last one means the end of the batch."""
    _, starts, counts, _ = requests
    before, is_later = tl.maximum(request - 1, 0), request > 0
    begin = tl.load(starts + before, mask=is_later, other=0) + tl.load(counts + before, mask=is_later, other=0)
    return begin, tl.load(starts + request, mask=request < num_reqs, other=num_tokens)


@jit
def find_request(starts, num_reqs, tile, TILE: tl.constexpr):
    """The request of a tile of rows; -1 before the first.

    A request has one tile more than its tokens may fill, so its first one, start // TILE + request, is known without
    counting those of others. In total there are fewer than num_tokens // TILE + num_reqs.
    """
    low: tl.int32 = 0
    high: tl.int32 = num_reqs
    while low < high:
        middle = (low + high) // 2
        begins = tl.load(starts + middle) // TILE + middle
        if begins <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1
