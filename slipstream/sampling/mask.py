"""The mask of allowed tokens at each position, for requests with a grammar.

Masks are kept in a pool on the device, each once, since a grammar has few different ones. A step brings only the
numbers of its rows in the pool, and the masks that are new.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation
from slipstream.kernels import native
from slipstream.kernels.triton_jit import jit, runs_triton, tl

_BLOCK = 4096


class TokenMasks(NamedTuple):
    pool: Tensor  # [num_masks, ceil(vocab / 32)] int32: bit t % 32 of word t // 32 allows token t
    rows: Tensor  # [n] int32: the mask of each position, by its row in the pool; below 0 every token is allowed


@operation(like="logits")
def apply_mask(
    logits: Tensor,  # [n, vocab]
    masks: TokenMasks,
) -> Tensor:
    if runs_triton(logits):
        return _launch(logits, masks)
    pool, rows = masks
    if (lib := native.usable(logits)) is not None and logits.is_contiguous():
        out = torch.empty_like(logits)
        pointers = (logits.data_ptr(), pool.data_ptr(), rows.data_ptr(), out.data_ptr())
        lib.slip_mask_rows(*pointers, *logits.shape, pool.shape[1])
        return out
    words = pool[rows.clamp(min=0).long()]
    bits = (words.unsqueeze(2) >> torch.arange(32, dtype=torch.int32, device=pool.device)) & 1
    allowed = bits.flatten(1)[:, : logits.shape[1]].bool() | (rows < 0).unsqueeze(1)
    return logits.masked_fill(~allowed, float("-inf"))


@operation(lambda token_ids: TensorSpec((token_ids.shape[0],), torch.bool))
def allows(
    masks: TokenMasks,
    token_ids: Tensor,  # [n] int; below 0 is no token
) -> Tensor:  # [n] bool: whether each position allows its token
    token = token_ids.clamp(min=0).long()
    word = masks.pool[masks.rows.clamp(min=0).long(), token >> 5]
    return ((word >> (token & 31).int()) & 1).bool() | (masks.rows < 0)


@operation(writes=("pool",))
def store_masks(
    pool: Tensor,  # [num_masks, words] int32
    rows: Tensor,  # [m] int32: where each one goes
    masks: Tensor,  # [m, words] int32
) -> None:
    pool.index_copy_(0, rows.long(), masks)


def _launch(logits: Tensor, masks: TokenMasks) -> Tensor:
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    n, size = logits.shape
    out = torch.empty(n, size, dtype=logits.dtype, device=logits.device)
    if n:
        grid = (n, -(-size // _BLOCK))
        pool, rows = masks
        _mask_kernel[grid](logits, logits.stride(0), pool, pool.stride(0), rows, out, size, BLOCK=_BLOCK, num_warps=4)
    return out


@jit
def _mask_kernel(logits, stride, pool, num_words, rows, out, size, BLOCK: tl.constexpr):
    """One program per row of logits and block of the vocabulary."""
    i = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + i).to(tl.int64)
    x = tl.load(logits + i * stride + column, mask=column < size, other=0.0)
    if row >= 0:
        word = tl.load(pool + row * num_words + column // 32, mask=column < size, other=0)
        x = tl.where((word >> (column % 32)) & 1 != 0, x, float("-inf"))
    tl.store(out + i * size + column, x, mask=column < size)
