"""The experts' layers on a GPU: (token, rank) pairs grouped by expert, and two matrix products over the groups.

The device is never asked how many tokens an expert got. Grids are sized by the maximum number of blocks for the shapes,
and a program without a block returns at once.

A row is summed in one loop over K whose steps depend on the model alone. How many rows share a tile depends on the
shapes of the batch, never on the routing of its tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.triton_jit import jit, next_power_of_2, tl


class Tiles(NamedTuple):
    rows: int
    columns: int
    num_stages: int


FEW = Tiles(rows=16, columns=32, num_stages=4)  # limited by reading weights: many small programs
MANY = Tiles(rows=64, columns=64, num_stages=3)


def tiles_for(num_pairs: int, num_experts: int) -> Tiles:
    return FEW if num_pairs <= FEW.rows * num_experts else MANY


def max_blocks(num_pairs: int, num_experts: int, rows: int) -> int:
    """The maximum number of blocks for any routing: a block begins with an expert, or follows a full one."""
    return min(num_pairs, num_pairs // rows + num_experts)


def group_pairs(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Pairs in the order of their experts, each expert's in original order; and the start of every expert, with the
    total at the end: [num_pairs] and [num_experts + 1], int32."""
    expert_ids = expert_ids.contiguous()
    num_pairs = expert_ids.numel()
    order = torch.empty(num_pairs, dtype=torch.int32, device=expert_ids.device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=expert_ids.device)
    block = min(1024, max(128, next_power_of_2(num_pairs)))
    _group_kernel[(num_experts + 1,)](expert_ids, order, starts, num_pairs, BLOCK=block, num_warps=4)
    return order, starts


def launch_experts(x: Tensor, weights: Tensor, expert_ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """``expert_mlp``; see there for the shapes."""
    x, weights, gate_up, down = (t.contiguous() for t in (x, weights, gate_up, down))
    num_tokens, num_chosen = expert_ids.shape
    num_experts, hidden, size = down.shape
    num_pairs = num_tokens * num_chosen
    order, starts = group_pairs(expert_ids, num_experts)
    tiles = tiles_for(num_pairs, num_experts)
    num_blocks = max_blocks(num_pairs, num_experts, tiles.rows)
    options = {
        "EXPERTS": next_power_of_2(num_experts),
        "BLOCK_M": tiles.rows,
        "BLOCK_N": tiles.columns,
        "BLOCK_K": 128 // x.element_size(),  # a full memory line per row
        "num_warps": 4,
        "num_stages": tiles.num_stages,
    }
    activated = x.new_empty(num_pairs, size)
    parts = torch.empty(num_pairs, hidden, dtype=torch.float32, device=x.device)
    out = torch.empty_like(x)
    _gate_up_kernel[(num_blocks, -(-size // tiles.columns))](
        x, gate_up, order, starts, activated, num_experts, num_chosen, hidden, size, **options
    )
    _down_kernel[(num_blocks, -(-hidden // tiles.columns))](
        activated, down, order, starts, parts, num_experts, hidden, size, **options
    )
    block = min(1024, next_power_of_2(hidden))
    _combine_kernel[(num_tokens, -(-hidden // block))](
        parts, weights, out, num_chosen, hidden, BLOCK=block, num_warps=4
    )
    return out


@jit
def _group_kernel(expert_ids, order, starts, num_pairs, BLOCK: tl.constexpr):
    """One program per expert, and one for the total: count the pairs of lower experts, then write its own."""
    expert = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    lower = tl.zeros([BLOCK], tl.int32)
    for at in range(0, num_pairs, BLOCK):
        ids = tl.load(expert_ids + at + offsets, mask=at + offsets < num_pairs, other=expert)
        lower += (ids < expert).to(tl.int32)
    position = tl.sum(lower, 0)
    tl.store(starts + expert, position)
    for at in range(0, num_pairs, BLOCK):
        pair = at + offsets
        ids = tl.load(expert_ids + pair, mask=pair < num_pairs, other=-1)
        own = (ids == expert).to(tl.int32)
        tl.store(order + position + tl.cumsum(own, 0) - 1, pair, mask=ids == expert)
        position += tl.sum(own, 0)


@jit
def _find_block(starts, num_experts, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """The expert of this program's block, num_experts or more for none; its first row, and the expert's end."""
    block = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    start = tl.load(starts + expert, mask=expert < num_experts, other=0)
    end = tl.load(starts + expert + 1, mask=expert < num_experts, other=0)
    num_blocks = (end - start + BLOCK_M - 1) // BLOCK_M
    block_end = tl.cumsum(num_blocks, 0)
    # Past the last block every expert counts, also those that only pad to a power of two.
    found = tl.sum((block_end <= block).to(tl.int32), 0)
    here = expert == found
    row = tl.sum(tl.where(here, start + (block - block_end + num_blocks) * BLOCK_M, 0), 0)
    return found, row, tl.sum(tl.where(here, end, 0), 0)


@jit
def _gate_up_kernel(
    x,
    gate_up,
    order,
    starts,
    activated,  # in grouped order, so that the next product reads dense rows
    num_experts,
    num_chosen,
    hidden,
    size,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    expert, first, end = _find_block(starts, num_experts, EXPERTS, BLOCK_M)
    if expert >= num_experts:
        return
    row = first + tl.arange(0, BLOCK_M)
    row_exists = row < end
    token = tl.load(order + row, mask=row_exists, other=0) // num_chosen
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_exists = column < size
    k = tl.arange(0, BLOCK_K)
    inputs = x + token.to(tl.int64)[:, None] * hidden + k[None, :]
    matrix = gate_up + expert.to(tl.int64) * 2 * size * hidden
    gate_rows = matrix + column.to(tl.int64)[None, :] * hidden + k[:, None]
    up_rows = matrix + (column + size).to(tl.int64)[None, :] * hidden + k[:, None]
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in range(0, hidden, BLOCK_K):
        inside = at + k < hidden
        values = tl.load(inputs + at, mask=row_exists[:, None] & inside[None, :], other=0.0)
        weight_exists = inside[:, None] & column_exists[None, :]
        gate_weight = tl.load(gate_rows + at, mask=weight_exists, other=0.0)
        up_weight = tl.load(up_rows + at, mask=weight_exists, other=0.0)
        gate = tl.dot(values, gate_weight, gate, input_precision="ieee")
        up = tl.dot(values, up_weight, up, input_precision="ieee")
    result = gate * tl.sigmoid(gate) * up
    to = activated + row.to(tl.int64)[:, None] * size + column[None, :]
    tl.store(to, result.to(activated.dtype.element_ty), mask=row_exists[:, None] & column_exists[None, :])


@jit
def _down_kernel(
    activated,
    down,
    order,
    starts,
    parts,  # in pair order
    num_experts,
    hidden,
    size,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    expert, first, end = _find_block(starts, num_experts, EXPERTS, BLOCK_M)
    if expert >= num_experts:
        return
    row = first + tl.arange(0, BLOCK_M)
    row_exists = row < end
    pair = tl.load(order + row, mask=row_exists, other=0)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_exists = column < hidden
    k = tl.arange(0, BLOCK_K)
    inputs = activated + row.to(tl.int64)[:, None] * size + k[None, :]
    matrix = down + expert.to(tl.int64) * hidden * size
    down_rows = matrix + column.to(tl.int64)[None, :] * size + k[:, None]
    result = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in range(0, size, BLOCK_K):
        inside = at + k < size
        values = tl.load(inputs + at, mask=row_exists[:, None] & inside[None, :], other=0.0)
        weight = tl.load(down_rows + at, mask=inside[:, None] & column_exists[None, :], other=0.0)
        result = tl.dot(values, weight, result, input_precision="ieee")
    to = parts + pair.to(tl.int64)[:, None] * hidden + column[None, :]
    tl.store(to, result, mask=row_exists[:, None] & column_exists[None, :])


@jit
def _combine_kernel(parts, weights, out, num_chosen, hidden, BLOCK: tl.constexpr):
    """Ranks are summed in their order, whatever experts they are."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < hidden
    total = tl.zeros([BLOCK], tl.float32)
    for rank in range(num_chosen):
        pair = token * num_chosen + rank
        part = tl.load(parts + pair * hidden + column, mask=exists, other=0.0)
        total += part * tl.load(weights + pair).to(tl.float32)
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), mask=exists)
