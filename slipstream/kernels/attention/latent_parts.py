"""How latent attention cuts the keys of a request into parts and joins them, and which program computes which parts.

Where a part begins depends on its number alone, so that a token's result is a sum in the same order in every batch.
Parts grow with the position: a short request has enough of them to be shared out, a long one few to be joined. Programs
take runs of parts with equally many keys; the runs are found on the device, which alone knows the lengths.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.device.operation import operation
from slipstream.kernels.attention.paged_attention import PagedRequests
from slipstream.kernels.triton_jit import jit, jit_general, next_power_of_2, runs_triton, tl

# Keys of a part, and how many parts have as many; the last number is never reached.
LADDER = ((128, 8), (256, 12), (512, 24), (1024, 48), (2048, 1 << 18))
_BEGINS_AT_ONCE = 4  # found by one program


def count_parts(length: int) -> int:
    """How many parts so many keys have."""
    count = 0
    for size, most in LADDER:
        here = min(length, size * most)
        count += -(-here // size)
        length -= here
    return count


def first_of_part(idx: int) -> int:
    """A part's first key."""
    first = 0
    for size, most in LADDER:
        here = min(idx, most)
        first += here * size
        idx -= here
    return first


class PartTable(NamedTuple):
    """The parts of a step's requests, by request and then by position."""

    part_starts: Tensor  # [num_reqs + 1] or longer, int32: parts of the requests before; after the last one: of all
    begins: (
        Tensor  # [num_programs + 1, 2] int32: request and part with which a program begins, and its predecessor ends
    )


@operation(writes=("table.part_starts", "table.begins"))
def schedule_parts(
    requests: PagedRequests,
    max_query_slots: int,  # requests with room for more tokens have no parts: they are computed in another way
    table: PartTable,
) -> None:
    if runs_triton(requests.seq_lens):
        _launch(requests, max_query_slots, table)
        return
    slots = requests.query_start_loc.diff()
    takes_part = (slots <= max_query_slots) & (requests.query_lens > 0) & (requests.seq_lens > 0)
    lens = torch.where(takes_part, requests.seq_lens, 0).long()
    counts = torch.tensor([count_parts(length) for length in lens.tolist()])
    num_reqs, num_programs = lens.shape[0], table.begins.shape[0] - 1
    table.part_starts[0] = 0
    table.part_starts[1 : num_reqs + 1] = counts.cumsum(0)
    table.part_starts[num_reqs + 1 :] = counts.sum()
    ends = lens.cumsum(0)
    # A program begins with the first part that lies after its predecessors' share of all keys.
    shares = -(-torch.arange(num_programs + 1) * ends[-1] // num_programs)
    request = torch.searchsorted(ends, shares)
    keys = shares - (ends - lens)[request]
    table.begins[:, 0] = request
    table.begins[:, 1] = torch.tensor([count_parts(num) for num in keys.tolist()])


def _launch(requests: PagedRequests, max_query_slots: int, table: PartTable) -> None:
    num_reqs, num_begins = requests.seq_lens.shape[0], table.begins.shape[0]
    num_starts = table.part_starts.shape[0]
    assert table.begins.is_contiguous() and num_starts > num_reqs
    _schedule_kernel[(-(-num_begins // _BEGINS_AT_ONCE),)](
        (requests.query_start_loc, requests.query_lens, requests.seq_lens),
        table.part_starts,
        table.begins,
        num_reqs,
        num_starts,
        num_begins - 1,
        max_query_slots,
        BLOCK_B=next_power_of_2(num_starts),
        BLOCK_P=_BEGINS_AT_ONCE,
        LADDER=LADDER,
        num_warps=4,
    )


@jit
def parts_of(length, LADDER: tl.constexpr):
    """``count_parts`` of one length or many."""
    count = length * 0
    for i in tl.static_range(len(LADDER)):
        here = tl.minimum(length, LADDER[i][0] * LADDER[i][1])
        count += (here + LADDER[i][0] - 1) // LADDER[i][0]
        length -= here
    return count


@jit
def first_key_of(part, LADDER: tl.constexpr):
    """``first_of_part``."""
    first = part * 0
    for i in tl.static_range(len(LADDER)):
        here = tl.minimum(part, LADDER[i][1])
        first += here * LADDER[i][0]
        part -= here
    return first


@jit
def joined_row(
    partial,
    weight,
    parts,  # the first, and the end
    rows,  # the row of part 0, and the distance to that of the next part
    LATENT: tl.constexpr,
    BLOCK_L: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """One row's parts in ascending order, several at once; zeros without any."""
    begin, end = parts
    i = tl.arange(0, BLOCK_L)
    largest, total = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
    acc = tl.zeros([BLOCK_L], tl.float32)
    for first in range(begin, end, AT_ONCE):
        part = first + tl.arange(0, AT_ONCE)
        there = part < end
        row = part.to(tl.int64) * rows[1] + rows[0]
        peak = tl.load(weight + row * 2, mask=there, other=float("-inf"))
        mass = tl.load(weight + row * 2 + 1, mask=there, other=0.0)
        kept = there[:, None] & (i < LATENT)[None, :]
        values = tl.load(partial + row[:, None] * LATENT + i[None, :], mask=kept, other=0.0)
        higher = tl.maximum(largest, tl.max(peak, 0))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        shrink, grow = tl.exp2(largest - anchor), tl.exp2(peak - anchor)
        total = total * shrink + tl.sum(mass * grow, 0)
        acc = acc * shrink + tl.sum(values * grow[:, None], 0)
        largest = higher
    return acc / tl.where(total == 0.0, 1.0, total)


@jit_general("num_reqs", "num_starts", "num_programs", "max_query_slots")
def _schedule_kernel(
    tables,  # query_start_loc, query_lens, seq_lens
    part_starts,
    begins,
    num_reqs,
    num_starts,
    num_programs,
    max_query_slots,
    BLOCK_B: tl.constexpr,
    BLOCK_P: tl.constexpr,
    LADDER: tl.constexpr,
):
    """A few of the begins; the first program writes the sums of parts as well."""
    query_start_loc, query_lens, seq_lens = tables
    b = tl.arange(0, BLOCK_B)
    exists = b < num_reqs
    slots = tl.load(query_start_loc + b + 1, mask=exists, other=0) - tl.load(query_start_loc + b, mask=exists, other=0)
    takes_part = exists & (slots <= max_query_slots) & (tl.load(query_lens + b, mask=exists, other=0) > 0)
    lens = tl.maximum(tl.load(seq_lens + b, mask=takes_part, other=0), 0)
    if tl.program_id(0) == 0:
        counts = parts_of(lens, LADDER)
        tl.store(part_starts + b, tl.cumsum(counts, 0) - counts, mask=b < num_starts)
    ends = tl.cumsum(lens, 0)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    num_keys = tl.sum(lens, 0).to(tl.int64)
    share = ((p * num_keys + num_programs - 1) // num_programs).to(tl.int32)
    is_before = ends[None, :] < share[:, None]
    request = tl.sum(is_before.to(tl.int32), 1)
    part = parts_of(share - tl.sum(tl.where(is_before, lens[None, :], 0), 1), LADDER)
    tl.store(begins + p * 2, request, mask=p <= num_programs)
    tl.store(begins + p * 2 + 1, part, mask=p <= num_programs)
