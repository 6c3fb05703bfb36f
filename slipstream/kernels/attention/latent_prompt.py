"""Attention of many new tokens per request, with keys and values that were made from a chunk of the cached latents.

Making them costs a product per key and pays if many queries share it. A long context comes chunk by chunk, so that the
keys and values of one chunk fit into memory; results of chunks are joined by the logarithms of their sums of weights.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation, spec_of
from slipstream.kernels.attention.latent_cache import alike_requests, slots_there
from slipstream.kernels.attention.latent_tiles import prompt_tile, room_of
from slipstream.kernels.attention.paged_attention import PagedRequests
from slipstream.kernels.triton_jit import jit_general, next_power_of_2, runs_triton, tl

_LOG2_E = 1.4426950408889634
_MERGED_ROWS = 4  # by one program


class PromptQueries(NamedTuple):
    """Queries in two parts, like keys."""

    nope: Tensor  # [num_tokens, num_heads, nope_dim]
    rope: Tensor  # [num_tokens, num_heads, rope_dim], rotated


class PromptKeys(NamedTuple):
    """A chunk of keys and values: slots of request i from row i * num_keys on."""

    up: Tensor  # [num_reqs * num_keys, num_heads, nope_dim + value_dim]: key without position, then value
    rope: Tensor  # [num_reqs * num_keys, rope_dim]: what all heads share


def _wide(kind: torch.dtype) -> torch.dtype:
    return torch.promote_types(kind, torch.float32)


def _prompt_shape(q: PromptQueries, keys: PromptKeys, wide: bool) -> tuple[TensorSpec, TensorSpec]:
    num_tokens, num_heads, nope_dim = q.nope.shape
    kind, value_dim = q.nope.dtype, keys.up.shape[2] - nope_dim
    out = TensorSpec((num_tokens, num_heads, value_dim), _wide(kind) if wide else kind)
    return out, TensorSpec((num_tokens, num_heads), _wide(kind))


@operation(_prompt_shape)
def prompt_attention(
    q: PromptQueries,
    keys: PromptKeys,
    requests: PagedRequests,
    first_key: int,
    num_keys: int,
    max_query_len: int,
    scale: float,
    wide: bool,  # the result in float32 at least: one of several chunks
) -> tuple[Tensor, Tensor]:  # result, and natural logarithm of the sum of weights; 0 and -inf where nothing is seen
    num_tokens, num_heads, nope_dim = q.nope.shape
    value_dim, kind = keys.up.shape[2] - nope_dim, _wide(q.nope.dtype)
    out = torch.zeros(num_tokens, num_heads, value_dim, dtype=kind if wide else q.nope.dtype, device=q.nope.device)
    lse = torch.full((num_tokens, num_heads), float("-inf"), dtype=kind, device=q.nope.device)
    if runs_triton(out):
        _launch_prompt(q, keys, requests, (first_key, num_keys, max_query_len, scale), out, lse)
        return out, lse
    num_reqs = requests.seq_lens.shape[0]
    up, rope = (x.view(num_reqs, num_keys, *x.shape[1:]) for x in keys)
    queries = torch.cat(q, dim=2)
    for some in alike_requests(requests, requests.query_lens > 0, first_key, num_keys):
        # Weight 0 times NaN is NaN.
        gone = ~slots_there(some.requests, first_key, some.num_keys)
        own_up = up[some.ids, : some.num_keys].masked_fill_(gone[:, :, None, None], 0.0)
        own_rope = rope[some.ids, : some.num_keys].masked_fill_(gone[:, :, None], 0.0)
        nope, values = own_up[..., :nope_dim], own_up[..., nope_dim:].to(out.dtype)
        full = torch.cat([nope, own_rope.unsqueeze(2).expand(*nope.shape[:3], -1)], dim=3)
        scores = torch.einsum("bqhd,bkhd->bqhk", queries[some.tokens] * scale, full).to(kind)
        scores.masked_fill_(some.hidden, float("-inf"))
        total = torch.logsumexp(scores, dim=3)
        weights = scores.sub_(total.nan_to_num(neginf=0.0).unsqueeze(3)).exp_()
        result = torch.einsum("bqhk,bkhd->bqhd", weights.to(out.dtype), values)
        out[some.tokens[some.exists]], lse[some.tokens[some.exists]] = result[some.exists], total[some.exists]
    return out, lse


def _merge_shape(first_out: Tensor, first_lse: Tensor, dtype: torch.dtype) -> tuple[TensorSpec, TensorSpec]:
    return TensorSpec(tuple(first_out.shape), dtype), spec_of(first_lse)


@operation(_merge_shape)
def merge_attention(
    first_out: Tensor,  # [num_tokens, num_heads, value_dim]
    first_lse: Tensor,  # [num_tokens, num_heads]; what is not finite says that nothing was seen
    second_out: Tensor,
    second_lse: Tensor,
    dtype: torch.dtype,  # of the result
) -> tuple[Tensor, Tensor]:
    if runs_triton(first_out):
        return _launch_merge(first_out, first_lse, second_out, second_lse, dtype)
    lses = torch.stack([first_lse, second_lse])
    is_seen = lses.isfinite()
    lse = torch.logsumexp(lses.masked_fill(~is_seen, float("-inf")), dim=0)
    weights = torch.where(is_seen, (lses - lse).exp(), 0.0).unsqueeze(3)
    parts = torch.stack([first_out, second_out]).to(lse.dtype)
    out = torch.where(is_seen.unsqueeze(3), parts * weights, 0.0).sum(0)
    return out.to(dtype), lse


def _launch_prompt(
    q: PromptQueries,
    keys: PromptKeys,
    requests: PagedRequests,
    sizes: tuple[int, int, int, float],
    out: Tensor,
    lse: Tensor,
) -> None:
    first_key, num_keys, max_query_len, scale = sizes
    num_heads, nope_dim, rope_dim, value_dim = q.nope.shape[1], q.nope.shape[2], q.rope.shape[2], out.shape[2]
    assert q.nope.stride(2) == q.rope.stride(2) == keys.up.stride(2) == keys.rope.stride(1) == 1
    blocks = {
        name: max(16, next_power_of_2(size))
        for name, size in (("BLOCK_P", nope_dim), ("BLOCK_R", rope_dim), ("BLOCK_V", value_dim))
    }
    item = q.nope.element_size()
    row_bytes = (blocks["BLOCK_P"] + blocks["BLOCK_R"]) * item, blocks["BLOCK_V"] * item
    tile = prompt_tile(max_query_len, row_bytes, item, room_of(out))
    _prompt_kernel[(-(-max_query_len // tile.rows), num_heads, requests.seq_lens.shape[0])](
        q,
        keys,
        (q.nope.stride(0), q.nope.stride(1), q.rope.stride(0), q.rope.stride(1)),
        (keys.up.stride(0), keys.up.stride(1), keys.rope.stride(0)),
        (requests.query_start_loc, requests.query_lens, requests.seq_lens, requests.seq_starts),
        (out, lse),
        first_key,
        num_keys,
        scale * _LOG2_E,
        NUM_HEADS=num_heads,
        NOPE=nope_dim,
        ROPE=rope_dim,
        VALUE=value_dim,
        **blocks,
        BLOCK_M=tile.rows,
        BLOCK_K=tile.keys,
        STARTS=requests.seq_starts is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _launch_merge(
    first_out: Tensor, first_lse: Tensor, second_out: Tensor, second_lse: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    assert all(x.is_contiguous() for x in (first_out, first_lse, second_out, second_lse))
    out, lse = torch.empty(first_out.shape, dtype=dtype, device=first_out.device), torch.empty_like(first_lse)
    num_rows, size = first_lse.numel(), first_out.shape[2]
    _merge_kernel[(-(-num_rows // _MERGED_ROWS),)](
        (first_out, first_lse, second_out, second_lse),
        out,
        lse,
        num_rows,
        SIZE=size,
        BLOCK=next_power_of_2(size),
        ROWS=_MERGED_ROWS,
        num_warps=2,
    )
    return out, lse


@jit_general("first_key", "num_keys")
def _prompt_kernel(
    q,  # nope, rope
    keys,  # up, rope
    q_strides,  # of tokens and heads of both
    key_strides,  # of rows and heads of up, of rows of rope
    tables,  # query_start_loc, query_lens, seq_lens, seq_starts if there are
    results,  # out, lse
    first_key,
    num_keys,
    scale,  # times log2(e): weights are powers of two
    NUM_HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STARTS: tl.constexpr,
):
    """A tile of a request's queries, one head, over its keys of the chunk."""
    # The last tile has the most keys and comes first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head, request = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    query_start_loc, query_lens, seq_lens, seq_starts = tables
    query_len, seq_len = tl.load(query_lens + request), tl.load(seq_lens + request)
    begin, end = first_key, tl.minimum(seq_len, first_key + num_keys)
    end = tl.minimum(end, seq_len - query_len + (tile + 1) * BLOCK_M)
    if STARTS:
        begin = tl.maximum(begin, tl.load(seq_starts + request))
    if (tile * BLOCK_M >= query_len) | (begin >= end):
        return
    query = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row, position = query < query_len, seq_len - query_len + query
    token = tl.load(query_start_loc + request).to(tl.int64) + query
    p, r, v = tl.arange(0, BLOCK_P)[None, :], tl.arange(0, BLOCK_R)[None, :], tl.arange(0, BLOCK_V)[None, :]
    from_nope = (q[0] + token * q_strides[0] + head * q_strides[1])[:, None] + p
    from_rope = (q[1] + token * q_strides[2] + head * q_strides[3])[:, None] + r
    q_nope = tl.load(from_nope, mask=is_row[:, None] & (p < NOPE), other=0.0)
    q_rope = tl.load(from_rope, mask=is_row[:, None] & (r < ROPE), other=0.0)
    largest, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    # Blocks begin where they do without a first slot.
    for first in range(first_key + (begin - first_key) // BLOCK_K * BLOCK_K, end, BLOCK_K):
        n = first + tl.arange(0, BLOCK_K)
        is_key = (n >= begin) & (n < end)
        row = request * num_keys + (n - first_key)
        up = (keys[0] + row * key_strides[0] + head * key_strides[1])[:, None]
        nope = tl.load(up + p, mask=is_key[:, None] & (p < NOPE), other=0.0)
        rope = tl.load((keys[1] + row * key_strides[2])[:, None] + r, mask=is_key[:, None] & (r < ROPE), other=0.0)
        values = tl.load(up + NOPE + v, mask=is_key[:, None] & (v < VALUE), other=0.0)
        scores = tl.dot(q_rope, tl.trans(rope.to(q_rope.dtype)), input_precision="ieee")
        scores = tl.dot(q_nope, tl.trans(nope), scores, input_precision="ieee") * scale
        visible = (n[None, :] <= position[:, None]) & is_key[None, :]
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, 1))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)  # a row without keys so far
        weights = tl.exp2(scores - anchor[:, None])
        shrink = tl.exp2(largest - anchor)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
        largest = higher
    sees = total > 0.0
    result = acc / tl.where(sees, total, 1.0)[:, None]
    place = token * NUM_HEADS + head
    to = results[0] + place[:, None] * VALUE + v
    tl.store(to, result.to(results[0].dtype.element_ty), mask=is_row[:, None] & (v < VALUE))
    lse = (largest + tl.log2(tl.where(sees, total, 1.0))) * 0.6931471805599453  # to base e
    tl.store(results[1] + place, tl.where(sees, lse, float("-inf")), mask=is_row)


@jit_general("num_rows")
def _merge_kernel(parts, out, lse, num_rows, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """A few rows: of both parts the result, and logarithm of the sum of weights."""
    first_out, first_lse, second_out, second_lse = parts
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists, d = row < num_rows, tl.arange(0, BLOCK)[None, :]
    nothing = float("-inf")
    a = tl.load(first_lse + row, mask=exists, other=nothing).to(tl.float32)
    b = tl.load(second_lse + row, mask=exists, other=nothing).to(tl.float32)
    # Not a number, or infinite: the part has no result.
    a = tl.where(tl.abs(a) < float("inf"), a, nothing)
    b = tl.where(tl.abs(b) < float("inf"), b, nothing)
    larger = tl.maximum(a, b)
    anchor = tl.where(larger == nothing, 0.0, larger)
    x, y = tl.exp(a - anchor), tl.exp(b - anchor)
    total = tl.where(larger == nothing, 1.0, x + y)
    tl.store(lse + row, larger + tl.log(total), mask=exists)
    place = row[:, None] * SIZE + d
    kept = exists[:, None] & (d < SIZE)
    left = tl.load(first_out + place, mask=kept & (a != nothing)[:, None], other=0.0).to(tl.float32)
    right = tl.load(second_out + place, mask=kept & (b != nothing)[:, None], other=0.0).to(tl.float32)
    result = (left * x[:, None] + right * y[:, None]) / total[:, None]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=kept)
