"""Attention of encoders: every token of a text attends to all tokens of it, and nothing is cached.

Texts lie one after another without padding. A model may add a bias to scores that depends on the distance of a key
from its query alone, a number for each head and distance.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.device.operation import operation
from slipstream.kernels import native
from slipstream.kernels.request_rows import find_request
from slipstream.kernels.triton_jit import jit, next_power_of_2, runs_triton, tl

LOG2_E = 1.4426950408889634


class Texts(NamedTuple):
    """Where the tokens of each text lie."""

    query_start_loc: Tensor  # [num_reqs + 1] int32
    query_lens: Tensor  # [num_reqs] int32: 0 for a row that does not run


@operation(like="q")
def encoder_attention(
    q: Tensor,  # [num_tokens, num_heads, head_dim], as k and v; they may be parts of one tensor
    k: Tensor,
    v: Tensor,
    texts: Texts,
    scale: float,
    bias: Tensor | None = None,  # [num_heads, 2 * span - 1] float32 at least: for keys span - 1 before to after a query
) -> Tensor:  # [num_tokens, num_heads, head_dim]; zero for padding
    if runs_triton(q):
        return _launch(q, k, v, texts, scale, bias)
    if native.usable(q) is not None:
        return _attend_natively(q, k, v, texts, scale, bias)
    out = q.new_zeros(q.shape)
    for start, length, count in _equal_runs(texts):
        shape, tokens = (count, length, *q.shape[1:]), slice(start, start + count * length)
        queries, keys, values = (x[tokens].view(shape).transpose(1, 2) for x in (q, k, v))
        scores = (queries @ keys.transpose(2, 3)).mul_(scale)
        if bias is not None:
            scores += _bias_of(bias, length)
        weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
        out[tokens].view(shape).copy_((weights @ values).transpose(1, 2))
    return out


def _equal_runs(texts: Texts) -> Iterator[tuple[int, int, int]]:
    """Neighbouring texts of equal length: where they begin, their length, and how many there are."""
    starts, lens = texts.query_start_loc.tolist(), texts.query_lens.tolist()
    idx = 0
    while idx < len(lens):
        count = 1
        while (
            idx + count < len(lens)
            and lens[idx + count] == lens[idx]
            and starts[idx + count] == starts[idx] + count * lens[idx]
        ):
            count += 1
        if lens[idx]:
            yield starts[idx], lens[idx], count
        idx += count


def _bias_of(bias: Tensor, length: int) -> Tensor:
    """[num_heads, length, length]: for each query and key."""
    positions, span = torch.arange(length), (bias.shape[1] + 1) // 2
    return bias[:, positions - positions.unsqueeze(1) + span - 1]


def _attend_natively(q: Tensor, k: Tensor, v: Tensor, texts: Texts, scale: float, bias: Tensor | None) -> Tensor:
    lib = native.library()
    assert lib is not None
    out, (_, num_heads, head_dim) = q.new_zeros(q.shape), q.shape
    q, k, v = (x if x.stride()[1:] == (head_dim, 1) else x.contiguous() for x in (q, k, v))
    arrays = [None if x is None else x.data_ptr() for x in (q, k, v, bias, *texts, out)]
    strides = (q.stride(0), k.stride(0), v.stride(0))
    sizes = (texts.query_lens.shape[0], num_heads, head_dim, 0 if bias is None else bias.shape[1])
    if lib.slip_encoder_attention(*arrays, *strides, *sizes, scale, torch.get_num_threads()):
        raise MemoryError("no memory for attention scores")
    return out


def _launch(q: Tensor, k: Tensor, v: Tensor, texts: Texts, scale: float, bias: Tensor | None) -> Tensor:
    num_tokens, num_heads, head_dim = q.shape
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    num_reqs, block_m = texts.query_lens.shape[0], 64
    block_d = max(16, next_power_of_2(head_dim))
    is_wide = block_d * q.element_size() >= 512
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    _encoder_attention_kernel[(num_tokens // block_m + num_reqs, num_heads)](
        (q, k, v),
        (q.stride(0), k.stride(0), v.stride(0)),
        (q.stride(1), k.stride(1), v.stride(1)),
        texts,
        bias,
        out,
        scale * LOG2_E,
        0 if bias is None else bias.shape[1],
        num_reqs,
        num_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_M=block_m,
        BLOCK_N=32 if is_wide else 64,
        BIAS=bias is not None,
        num_warps=4,
        num_stages=1 if is_wide else 2,
    )
    return out


@jit
def _encoder_attention_kernel(
    inputs,  # queries, keys and values
    token_strides,
    head_strides,
    texts,  # query_start_loc, query_lens
    bias,
    out,
    scale,  # times log2(e): weights are powers of two
    num_distances,
    num_reqs,
    num_heads,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BIAS: tl.constexpr,
):
    """One program for a tile of one text's queries and one head; it goes over all keys of the text."""
    tile, head = tl.program_id(0), tl.program_id(1)
    query_start_loc, query_lens = texts
    request = find_request(query_start_loc, num_reqs, tile, BLOCK_M)
    start = tl.load(query_start_loc + request)
    length = tl.load(query_lens + request)
    first = (tile - (start // BLOCK_M + request)) * BLOCK_M
    if first >= length:
        return
    m, d = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    is_query, is_value = m < length, d < HEAD_DIM
    kept = is_query[:, None] & is_value[None, :]
    begin, at_head = start.to(tl.int64), head.to(tl.int64)
    from_queries = (begin + m)[:, None] * token_strides[0] + at_head * head_strides[0] + d[None, :]
    queries = tl.load(inputs[0] + from_queries, mask=kept, other=0.0)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for chunk in range(0, length, BLOCK_N):
        n = chunk + tl.arange(0, BLOCK_N)
        is_key = n < length
        loads = is_key[:, None] & is_value[None, :]
        from_keys = (begin + n)[:, None] * token_strides[1] + at_head * head_strides[1] + d[None, :]
        keys = tl.load(inputs[1] + from_keys, mask=loads, other=0.0)
        from_values = (begin + n)[:, None] * token_strides[2] + at_head * head_strides[2] + d[None, :]
        values = tl.load(inputs[2] + from_values, mask=loads, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        visible = is_query[:, None] & is_key[None, :]
        if BIAS:
            distance = n[None, :] - m[:, None] + num_distances // 2
            added = tl.load(bias + at_head * num_distances + distance, mask=visible, other=0.0)
            scores += added.to(tl.float32) * 1.4426950408889634
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, 1))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - anchor[:, None])
        shrink = tl.exp2(largest - anchor)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(queries.dtype), values, acc * shrink[:, None], input_precision="ieee")
        largest = higher
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    to = ((begin + m) * num_heads + at_head)[:, None] * HEAD_DIM + d[None, :]
    tl.store(out + to, result.to(out.dtype.element_ty), mask=kept)
