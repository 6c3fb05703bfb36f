"""The products of a decoder layer fused with the operations around them: norms, gates, the residual stream.

For steps of few tokens on a GPU; ``small_linear`` explains how. A norm is split: its gain is applied when a token is
stored (``scaled``), its factor when the token is next multiplied, from the sums of squares stored with it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation, spec_of
from slipstream.kernels.elementwise.geglu import ACTIVATIONS
from slipstream.kernels.linear.dense_linear import embedding, linear
from slipstream.kernels.linear.small_linear import Epilogue, Scaled, small_linear
from slipstream.kernels.triton_jit import (
    early_start,
    jit,
    let_next_start,
    next_power_of_2,
    runs_triton,
    tl,
    wait_for_last,
)
from slipstream.kernels.tuning.tiles import prefers_library, tile_for


def _squares_spec(x: Tensor) -> TensorSpec:
    return TensorSpec((x.shape[0], 1), torch.promote_types(x.dtype, torch.float32))


@operation(lambda x: (spec_of(x), _squares_spec(x)))
def scale_tokens(
    x: Tensor,  # [num_tokens, size]
    gain: Tensor,  # [size], of a norm
) -> tuple[Tensor, Tensor]:  # the tokens with the gain; [num_tokens, parts] whose sum is a token's sum of squares
    if runs_triton(x):
        return _scale(x.contiguous(), None, gain)[1:]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * gain).to(x.dtype), wide.square().sum(1, keepdim=True)


def _embed_shape(weight: Tensor, token_ids: Tensor) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
    spec = TensorSpec((token_ids.shape[0], weight.shape[1]), weight.dtype)
    squares = TensorSpec((token_ids.shape[0], 1), torch.promote_types(weight.dtype, torch.float32))
    return spec, spec, squares


@operation(_embed_shape)
def embed_scaled(
    weight: Tensor,  # [vocab, size]
    token_ids: Tensor,  # [num_tokens] int32
    gain: Tensor,  # [size], of the norm that follows
) -> tuple[Tensor, Tensor, Tensor]:  # the embeddings; the same with the gain; their sums of squares
    if runs_triton(weight):
        return _scale(weight, None, gain, token_ids)
    x = embedding.body(weight, token_ids)
    return x, *scale_tokens.body(x, gain)


@operation(lambda x: (spec_of(x), spec_of(x), _squares_spec(x)))
def add_scaled(
    x: Tensor,  # [num_tokens, size]
    residual: Tensor,  # [num_tokens, size], tokens may be strided
    gain: Tensor,  # [size], of the norm that follows
) -> tuple[Tensor, Tensor, Tensor]:  # the sum; the same with the gain; its sums of squares
    if runs_triton(x):
        return _scale(x, residual, gain)
    total = x + residual
    return total, *scale_tokens.body(total, gain)


def _scale(
    x: Tensor, residual: Tensor | None, gain: Tensor, rows: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The stream, new if something is added or rows are chosen; the same with the gain; its sums of squares."""
    size, num_tokens = x.shape[1], x.shape[0] if rows is None else rows.shape[0]
    scaled = torch.empty(num_tokens, size, dtype=x.dtype, device=x.device)
    out = x if residual is None and rows is None else torch.empty_like(scaled)
    squares = torch.empty(num_tokens, 1, dtype=torch.float32, device=x.device)
    block = next_power_of_2(size)
    _scale_kernel[(num_tokens,)](
        x,
        x if residual is None else residual,
        gain,
        x if rows is None else rows,
        out,
        scaled,
        squares,
        size,
        0 if residual is None else residual.stride(0),
        SUM=residual is not None,
        CHOOSES=rows is not None,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
        **early_start(x),
    )
    return out, scaled, squares


def _normed(scaled: Tensor, squares: Tensor, eps: float) -> Tensor:
    wide = scaled.to(squares.dtype)
    return wide * torch.rsqrt(squares.sum(1, keepdim=True) / scaled.shape[1] + eps)


@operation(lambda scaled, weight: TensorSpec((scaled.shape[0], weight.shape[0]), scaled.dtype))
def scaled_linear(
    scaled: Tensor,  # [num_tokens, in]
    squares: Tensor,  # [num_tokens, parts]
    eps: float,
    weight: Tensor,  # [out, in]
    bias: Tensor | None,  # [out]
) -> Tensor:  # [num_tokens, out]: the product of the normed tokens
    if runs_triton(scaled):
        tile = tile_for("norm", scaled, weight.shape[0])
        return small_linear(Scaled(scaled, squares, eps), weight, Epilogue(bias), tile).out
    return linear.body(_normed(scaled, squares, eps).to(scaled.dtype), weight, bias)


@operation(lambda x, weight: TensorSpec((x.shape[0], weight.shape[0]), x.dtype))
def linear_few(
    x: Tensor,  # [num_tokens, in], few of them
    weight: Tensor,  # [out, in]
    bias: Tensor | None,  # [out]
) -> Tensor:  # [num_tokens, out]: the product alone
    if runs_triton(x):
        return small_linear(x, weight, Epilogue(bias), tile_for("plain", x, weight.shape[0])).out
    return linear.body(x, weight, bias)


def _linear_scaled_shape(x: Tensor, weight: Tensor) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
    out = TensorSpec((x.shape[0], weight.shape[0]), x.dtype)
    return out, out, _squares_spec(x)


@operation(_linear_scaled_shape)
def linear_scaled(
    x: Tensor,  # [num_tokens, in]
    weight: Tensor,  # [out, in]
    bias: Tensor | None,  # [out]
    gain: Tensor,  # [out], of the norm that follows
) -> tuple[Tensor, Tensor, Tensor]:  # the product; the same with the gain; its sums of squares
    if runs_triton(x):
        made = small_linear(x, weight, Epilogue(bias, gain=gain), tile_for("plain", x, weight.shape[0]))
        assert made.scaled is not None
        assert made.squares is not None
        return made.out, made.scaled, made.squares
    total = linear.body(x, weight, bias)
    return total, *scale_tokens.body(total, gain)


@operation(lambda scaled, weight: TensorSpec((scaled.shape[0], weight.shape[0] // 2), scaled.dtype))
def scaled_gated(
    scaled: Tensor,  # [num_tokens, in]
    squares: Tensor,  # [num_tokens, parts]
    eps: float,
    weight: Tensor,  # [2 * out, in], gates first
    bias: Tensor | None,  # [2 * out]
    activation: str,  # of the gate: "silu" or "gelu_tanh"
) -> Tensor:  # [num_tokens, out]
    if runs_triton(scaled):
        tile = tile_for("gated", scaled, weight.shape[0] // 2)
        return small_linear(Scaled(scaled, squares, eps), weight, Epilogue(bias, activation=activation), tile).out
    return ACTIVATIONS[activation].body(linear.body(_normed(scaled, squares, eps).to(scaled.dtype), weight, bias))


@operation(like="residual")
def linear_add(
    x: Tensor,  # [num_tokens, in]
    weight: Tensor,  # [out, in]
    bias: Tensor | None,  # [out]
    residual: Tensor,  # [num_tokens, out]
) -> Tensor:  # [num_tokens, out]: residual + product
    if runs_triton(x) and not prefers_library(x, weight.shape[0]):
        return small_linear(x, weight, Epilogue(bias, residual), tile_for("add", x, weight.shape[0])).out
    return F.linear(x, weight, bias).add_(residual)


@operation(lambda x, residual: (spec_of(residual), spec_of(residual), _squares_spec(x)))
def linear_add_scaled(
    x: Tensor,  # [num_tokens, in]
    weight: Tensor,  # [out, in]
    bias: Tensor | None,  # [out]
    residual: Tensor,  # [num_tokens, out]
    gain: Tensor,  # [out], of the norm that follows
) -> tuple[Tensor, Tensor, Tensor]:  # residual + product; the same with the gain; its sums of squares
    if runs_triton(x) and prefers_library(x, weight.shape[0]):
        return add_scaled.body(F.linear(x, weight, bias), residual, gain)
    if runs_triton(x):
        end = Epilogue(bias, residual, gain)
        made = small_linear(x, weight, end, tile_for("add", x, weight.shape[0]))
        assert made.scaled is not None
        assert made.squares is not None
        return made.out, made.scaled, made.squares
    total = F.linear(x, weight, bias).add_(residual)
    return total, *scale_tokens.body(total, gain)


@jit
def _scale_kernel(
    x,
    residual,
    gain,
    rows,
    out,
    scaled,
    squares,
    size,
    residual_stride,
    SUM: tl.constexpr,
    CHOOSES: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    exists, at = column < size, token * size + column
    factors = tl.load(gain + column, mask=exists, other=0.0).to(tl.float32)
    wait_for_last(EARLY)
    let_next_start(EARLY)
    row = tl.load(rows + token).to(tl.int64) if CHOOSES else token
    value = tl.load(x + row * size + column, mask=exists, other=0.0).to(tl.float32)
    if CHOOSES:
        tl.store(out + at, value.to(out.dtype.element_ty), mask=exists)
    if SUM:
        before = tl.load(residual + token * residual_stride + column, mask=exists, other=0.0).to(tl.float32)
        total = (value + before).to(out.dtype.element_ty)
        tl.store(out + at, total, mask=exists)
        value = total.to(tl.float32)  # rounded as stored: the next norm applies to the stored stream
    tl.store(scaled + at, (value * factors).to(scaled.dtype.element_ty), mask=exists)
    tl.store(squares + token, tl.sum(value * value, 0))
