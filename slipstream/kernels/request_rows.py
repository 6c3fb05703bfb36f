"""Which rows of a batch's tokens belong to which request, and where a request stands.

The layers whose state is not a page of keys describe a batch by four tensors, one number a request: the slot of its
state, the row of its first token, how many of its tokens are alive, and the position of the first one. Requests stand
as in ``query_start_loc``: starts ascend, and the living tokens of one end before the next one starts. Rows between
them, and behind the last, belong to nobody. Who has no living tokens, as padding has, touches nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.triton_jit import jit, tl


def living_rows(starts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each living token: its row, its request, and its number in it."""
    counts = counts.long()
    request = torch.repeat_interleave(torch.arange(counts.shape[0], device=counts.device), counts)
    number = torch.arange(request.shape[0], device=counts.device) - (counts.cumsum(0) - counts)[request]
    return starts.long()[request] + number, request, number


@jit
def describe(requests, request, num_reqs):
    """Slot, first row, living tokens and first position; nothing lives outside.

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
    """The rows of nobody in front of a request: first and end. A request more than there are stands for the end."""
    _, starts, counts, _ = requests
    before, is_later = tl.maximum(request - 1, 0), request > 0
    begin = tl.load(starts + before, mask=is_later, other=0) + tl.load(counts + before, mask=is_later, other=0)
    return begin, tl.load(starts + request, mask=request < num_reqs, other=num_tokens)


@jit
def find_request(starts, num_reqs, tile, TILE: tl.constexpr):
    """The request of a tile of rows; -1 in front of all.

    A request has one tile more than its tokens may fill, so its first one, start // TILE + request, is known without
    counting those of others. In all there are fewer than num_tokens // TILE + num_reqs.
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
