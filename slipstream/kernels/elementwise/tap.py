"""Copies the residual stream between two layers, the sum that the next norm would compute, into a given buffer."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import operation
from slipstream.kernels.triton_jit import (
    early_start,
    jit,
    let_next_start,
    next_power_of_2,
    runs_triton,
    tl,
    wait_for_last,
)


@operation(writes=("out",))
def tap(
    hidden: Tensor,  # [num_tokens, hidden]: the last layer's output, or the stream itself
    residual: Tensor | None,  # [num_tokens, hidden]: the stream that it is not yet added to
    out: Tensor,  # [num_tokens, hidden], rows may be strided: several taps are adjacent
) -> None:
    if runs_triton(out):
        _tap_triton(hidden, residual, out)
    elif residual is None:
        out.copy_(hidden)
    else:
        torch.add(hidden, residual, out=out)


def _tap_triton(hidden: Tensor, residual: Tensor | None, out: Tensor) -> None:
    """A kernel that starts early, since it runs between two products that do."""
    num_tokens, size = hidden.shape
    other = hidden if residual is None else residual
    assert hidden.stride(1) == other.stride(1) == out.stride(1) == 1
    block = next_power_of_2(size)
    _tap_kernel[(num_tokens,)](
        hidden,
        other,
        out,
        size,
        hidden.stride(0),
        other.stride(0),
        out.stride(0),
        SUM=residual is not None,
        BLOCK=block,
        num_warps=min(8, max(1, block // 256)),
        **early_start(out),
    )


@jit
def _tap_kernel(
    hidden,
    residual,
    out,
    size,
    hidden_stride,
    residual_stride,
    out_stride,
    SUM: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    exists = column < size
    wait_for_last(EARLY)
    let_next_start(EARLY)
    value = tl.load(hidden + token * hidden_stride + column, mask=exists)
    if SUM:
        other = tl.load(residual + token * residual_stride + column, mask=exists)
        value = value.to(tl.float32) + other.to(tl.float32)
    tl.store(out + token * out_stride + column, value.to(out.dtype.element_ty), mask=exists)
