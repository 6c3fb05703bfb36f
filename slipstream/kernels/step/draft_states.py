"""Inputs and outputs of a pass of a draft head: a token's embedding beside a hidden state."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation
from slipstream.kernels.elementwise.rms_norm import rms_norm
from slipstream.kernels.native.step import compiled, in_c
from slipstream.kernels.triton_jit import (
    early_start,
    jit,
    let_next_start,
    next_power_of_2,
    runs_triton,
    tl,
    wait_for_last,
)


@operation(lambda hidden: TensorSpec((hidden.shape[0], 2 * hidden.shape[1]), hidden.dtype))
def join_states(
    hidden: Tensor,  # [n, size]
    embedding: Tensor,  # [vocab, size]
    token_ids: Tensor | None,  # [n] int32; None: the table has a row for each token, in order
    embedding_gain: Tensor | None,  # [size], of the embeddings' norm
    hidden_gain: Tensor | None,  # [size], of the states'; both are normed, or neither
    eps: float,
    positions: Tensor | None = None,  # [n] int64, if the embedding at position 0 is zeroed
) -> Tensor:  # [n, 2 * size]: embeddings, followed by the states
    if runs_triton(hidden):
        return _launch_join(hidden, embedding, token_ids, embedding_gain, hidden_gain, eps, positions)
    rows = embedding.clone() if token_ids is None else torch.index_select(embedding, 0, token_ids)
    if positions is not None:
        rows.masked_fill_((positions == 0).unsqueeze(1), 0.0)
    if embedding_gain is not None and hidden_gain is not None:
        rows, hidden = rms_norm.body(rows, embedding_gain, eps), rms_norm.body(hidden, hidden_gain, eps)
    return torch.cat([rows, hidden], dim=-1)


@in_c(join_states)
def _join_in_c(
    hidden: Tensor,
    embedding: Tensor,
    token_ids: Tensor | None,
    embedding_gain: Tensor | None,
    hidden_gain: Tensor | None,
    eps: float,
    positions: Tensor | None = None,
) -> Tensor:
    if hidden.dtype is not torch.float32 or not embedding.is_contiguous():
        return join_states.body(hidden, embedding, token_ids, embedding_gain, hidden_gain, eps, positions)
    hidden = _dense_rows(hidden)
    n, size = hidden.shape
    out = torch.empty(n, 2 * size)
    given = (token_ids, positions, embedding_gain, hidden_gain)
    arrays = (None if tensor is None else tensor.data_ptr() for tensor in given)
    states = (hidden.data_ptr(), hidden.stride(0), embedding.data_ptr())
    compiled().slip_join_states(*states, *arrays, eps, out.data_ptr(), n, size)
    return out


@operation(writes=("kept",))
def keep_states(
    states: Tensor,  # [num_tokens, modules * size]: the outputs of all modules, concatenated
    indices: Tensor,  # [n] int64: the tokens to keep
    # written:
    kept: Tensor,  # [modules, n, size]
) -> None:
    if runs_triton(states):
        _launch_keep(states, indices, kept)
        return
    kept.copy_(states.index_select(0, indices).view(kept.shape[1], kept.shape[0], kept.shape[2]).transpose(0, 1))


@in_c(keep_states)
def _keep_in_c(states: Tensor, indices: Tensor, kept: Tensor) -> None:
    if states.dtype is not torch.float32 or kept.stride()[1:] != (kept.shape[2], 1):
        keep_states.body(states, indices, kept)
        return
    states = _dense_rows(states)
    arrays = (states.data_ptr(), states.stride(0), indices.data_ptr(), kept.data_ptr())
    compiled().slip_keep_states(*arrays, *kept.shape, kept.stride(0))


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _launch_join(
    hidden: Tensor,
    embedding: Tensor,
    token_ids: Tensor | None,
    embedding_gain: Tensor | None,
    hidden_gain: Tensor | None,
    eps: float,
    positions: Tensor | None,
) -> Tensor:
    hidden = _dense_rows(hidden)
    n, size = hidden.shape
    out = torch.empty(n, 2 * size, dtype=hidden.dtype, device=hidden.device)
    if n == 0:
        return out
    block = next_power_of_2(size)
    _join_kernel[(n, 2)](
        hidden,
        embedding,
        token_ids,
        embedding_gain,
        hidden_gain,
        positions,
        out,
        hidden.stride(0),
        size,
        eps,
        NORM=embedding_gain is not None and hidden_gain is not None,
        IN_ORDER=token_ids is None,
        MASKED=positions is not None,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
        **early_start(hidden),
    )
    return out


def _launch_keep(states: Tensor, indices: Tensor, kept: Tensor) -> None:
    states = _dense_rows(states)
    num_modules, n, size = kept.shape
    assert kept.stride(1) == size, "a module's states are contiguous"
    if n == 0:
        return
    block = next_power_of_2(size)
    _keep_kernel[(n, num_modules)](
        states,
        indices,
        kept,
        states.stride(0),
        kept.stride(0),
        size,
        BLOCK=block,
        num_warps=min(8, max(1, block // 512)),
        **early_start(states),
    )


@jit
def _join_kernel(
    hidden,
    embedding,
    token_ids,
    embedding_gain,
    hidden_gain,
    positions,
    out,
    hidden_stride,
    size,
    eps,
    NORM: tl.constexpr,
    IN_ORDER: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    token, half, column = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    exists = column < size
    if NORM:
        gain = tl.load(embedding_gain + column, mask=exists & (half == 0), other=0.0).to(tl.float32)
        gain += tl.load(hidden_gain + column, mask=exists & (half == 1), other=0.0).to(tl.float32)
    wait_for_last(EARLY)
    let_next_start(EARLY)
    is_embedding = exists & (half == 0)
    if MASKED:
        is_embedding = is_embedding & (tl.load(positions + token) != 0)
    row = token if IN_ORDER else tl.load(token_ids + token).to(tl.int64)
    # Of the two one is read.
    embedded = tl.load(embedding + row * size + column, mask=is_embedding, other=0.0)
    state = tl.load(hidden + token * hidden_stride + column, mask=exists & (half == 1), other=0.0)
    value = tl.where(half == 0, embedded, state)
    if NORM:
        wide = value.to(tl.float32)
        wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / size + eps) * gain
        value = wide.to(out.dtype.element_ty)
    tl.store(out + (2 * token + half) * size + column, value, mask=exists)


@jit
def _keep_kernel(
    states,
    indices,
    kept,
    states_stride,
    module_stride,
    size,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    i, module, column = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK)
    exists = column < size
    wait_for_last(EARLY)
    let_next_start(EARLY)
    token = tl.load(indices + i)
    value = tl.load(states + token * states_stride + module * size + column, mask=exists, other=0.0)
    tl.store(kept + module * module_stride + i * size + column, value, mask=exists)
