"""The gated delta rule: a head's state decays, then adds the difference of a key's value from its prediction.

    state = exp(g) * state;  state += key (x) beta * (value - key @ state);  out = query @ state

A request has a ring of states in a pool: the one after its first p tokens lies in entry p modulo the ring's length. A
step of no more tokens than that leaves the state after each of them, and where the next step begins says which of them
counts: rejected drafts leave no trace, and nothing is copied. At position 0 the state is zero, whatever the pool
holds. A longer run of tokens, a part of a prompt, leaves its last state only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation
from slipstream.kernels.recurrent.delta_chunks import CHUNK, gates, launch_chunks, unit_factor
from slipstream.kernels.request_rows import RequestStates, describe, gap_before
from slipstream.kernels.triton_jit import (
    early_start,
    jit,
    jit_general,
    let_next_start,
    next_power_of_2,
    runs_triton,
    tl,
    wait_for_last,
)

_COLUMNS = 32  # of a state in one program: a full line of memory
_EMPTY_ROWS = 16  # rows of no request at once


class DeltaTokens(NamedTuple):
    """What a layer makes of its tokens, and how it forgets."""

    qkv: Tensor  # [num_tokens, 2 * k_heads * k_dim + v_heads * v_dim]: queries, keys, values, as convolved
    a: Tensor  # [num_tokens, v_heads], rows may lie apart; how much is forgotten
    b: Tensor  # [num_tokens, v_heads], rows may lie apart; how much is learnt
    a_log: Tensor  # [v_heads]
    dt_bias: Tensor  # [v_heads]


def _shape(tokens: DeltaTokens, states: Tensor) -> TensorSpec:
    return TensorSpec((tokens.qkv.shape[0], states.shape[2], states.shape[4]), tokens.qkv.dtype)


@operation(_shape, writes=("states",))
def recurrent_delta_rule(
    tokens: DeltaTokens,
    states: Tensor,  # [num_slots, ring, v_heads, k_dim, v_dim], at least float32
    requests: RequestStates,
    max_count: int,  # no request has more tokens; few
) -> Tensor:  # [num_tokens, v_heads, v_dim]; zero for rows of no request
    """Token by token. Of a request with more tokens than the ring's length only the last states are stored.

    States are read before the previous kernel has ended: that one, the convolution, writes none.
    """
    qkv = tokens.qkv
    if runs_triton(qkv):
        out = qkv.new_empty(qkv.shape[0], states.shape[2], states.shape[4])
        _launch_recurrence(tokens, states, requests, max_count, out)
        return out
    out = torch.zeros(qkv.shape[0], states.shape[2], states.shape[4], dtype=qkv.dtype, device=qkv.device)
    _recur(_heads(tokens, states), states, requests, max_count, out)
    return out


@operation(_shape, writes=("states",))
def chunked_delta_rule(tokens: DeltaTokens, states: Tensor, requests: RequestStates) -> Tensor:
    """In chunks of tokens, for prompts and for batches in which some decode.

    A request of no more tokens than the ring is long goes token by token and leaves all states: drafts beside a prompt
    are checked as they are without one.
    """
    qkv, ring, counts = tokens.qkv, states.shape[1], requests.counts
    if runs_triton(qkv):
        out = qkv.new_empty(qkv.shape[0], states.shape[2], states.shape[4])
        _launch_recurrence(tokens, states, requests, ring, out)
        launch_chunks(tokens, states, requests, ring, out)
        return out
    heads = _heads(tokens, states)
    out = torch.zeros(qkv.shape[0], states.shape[2], states.shape[4], dtype=qkv.dtype, device=qkv.device)
    _recur(heads, states, requests._replace(counts=torch.where(counts <= ring, counts, 0)), ring, out)
    for slot, start, count, position in zip(*(t.tolist() for t in requests), strict=True):
        if count > ring:
            rows = slice(start, start + count)
            before = states[slot, position % ring] if position else torch.zeros_like(states[slot, 0])
            made, after = _in_chunks(Heads(*(t[rows].transpose(0, 1) for t in heads)), before.to(heads.q.dtype))
            out[rows] = made.transpose(0, 1).to(out.dtype)
            states[slot, (position + count) % ring] = after.to(states.dtype)
    return out


class Heads(NamedTuple):
    """The rule's inputs, in at least float32, [num_tokens, v_heads, ...]."""

    q: Tensor  # of unit length, scaled
    k: Tensor  # of unit length
    v: Tensor
    g: Tensor  # logarithm of the decay of the state
    beta: Tensor


def _heads(tokens: DeltaTokens, states: Tensor) -> Heads:
    qkv, a, b, a_log, dt_bias = tokens
    _, _, v_heads, k_dim, v_dim = states.shape
    wide = torch.promote_types(qkv.dtype, torch.float32)
    size = (qkv.shape[1] - v_heads * v_dim) // 2
    q, k, v = torch.split(qkv.to(wide), [size, size, v_heads * v_dim], dim=1)
    q, k = (t.reshape(t.shape[0], -1, k_dim) for t in (q, k))
    q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    q, k = (t.repeat_interleave(v_heads // t.shape[1], dim=1) for t in (q * k_dim**-0.5, k))
    g = -a_log.to(wide).exp() * F.softplus(a.to(wide) + dt_bias.to(wide))
    return Heads(q, k, v.reshape(-1, v_heads, v_dim), g, b.to(wide).sigmoid())


def _recur(heads: Heads, states: Tensor, requests: RequestStates, max_count: int, out: Tensor) -> None:
    """The rule as defined, for all requests at once, one token of each at a time."""
    slots, starts, counts, positions = (t.long() for t in requests)
    ring = states.shape[1]
    current = states[slots, positions % ring].to(heads.q.dtype)
    current[positions == 0] = 0
    for i in range(max_count):
        alive = (counts > i).nonzero().squeeze(1)
        q, k, v, g, beta = (t[starts[alive] + i].unsqueeze(-1) for t in heads)
        state = current[alive] * g.unsqueeze(-1).exp()
        news = (v.squeeze(-1) - (state * k).sum(-2)) * beta
        state = state + k * news.unsqueeze(-2)
        out[starts[alive] + i] = (state * q).sum(-2).to(out.dtype)
        current[alive] = state
        states[slots[alive], (positions[alive] + i + 1) % ring] = state.to(states.dtype)


def _in_chunks(heads: Heads, state: Tensor) -> tuple[Tensor, Tensor]:
    """One request, heads first, in chunks: the updates of a chunk's tokens solve a triangular system."""
    made = []
    for q, k, v, g, beta in zip(*(torch.split(t, CHUNK, dim=1) for t in heads), strict=True):
        # Sums in float64: after a token that forgets nearly all, their differences are still those of the others.
        g, beta = g.double().cumsum(1).unsqueeze(-1), beta.unsqueeze(-1)
        decay, kept, left = (t.exp().to(q.dtype) for t in ((g - g.mT).tril(), g, g[:, -1:] - g))
        decay, known = decay.tril(), kept * (k @ state)
        # The solver assumes ones on the diagonal.
        news = torch.linalg.solve_triangular(
            beta * (k @ k.mT) * decay, beta * (v - known), upper=False, unitriangular=True
        )
        made.append(kept * (q @ state) + (q @ k.mT * decay) @ news)
        state = kept[:, -1:] * state + (left * k).mT @ news
    return torch.cat(made, dim=1), state


def _launch_recurrence(
    tokens: DeltaTokens, states: Tensor, requests: RequestStates, max_count: int, out: Tensor
) -> None:
    """Requests of at most so many tokens, and the rows of no request."""
    num_reqs, (qkv, a, b, *decay) = requests.slots.shape[0], tokens
    _, ring, v_heads, k_dim, v_dim = states.shape
    assert states.is_contiguous() and states.dtype == torch.float32
    assert qkv.stride(1) == a.stride(1) == b.stride(1) == 1
    columns = min(_COLUMNS, next_power_of_2(v_dim))
    # One request more than there are: for the rows of no request after the last.
    _recurrent_kernel[(v_heads * -(-v_dim // columns), num_reqs + 1)](
        qkv,
        (a, b, *decay),
        states,
        tuple(requests),
        out,
        num_reqs,
        qkv.shape[0],
        max_count,
        qkv.stride(0),
        a.stride(0),
        b.stride(0),
        k_dim**-0.5,
        RING=ring,
        K_HEADS=(qkv.shape[1] - v_heads * v_dim) // (2 * k_dim),
        V_HEADS=v_heads,
        K_DIM=k_dim,
        V_DIM=v_dim,
        BLOCK_K=next_power_of_2(k_dim),
        BLOCK_V=columns,
        EMPTY=_EMPTY_ROWS,
        num_warps=4,
        **early_start(qkv),
    )


@jit
def _load_token(row, there, qkv, gating, strides, head, v, scale, K_HEADS, V_HEADS, K_DIM, V_DIM, BLOCK_K):
    """Query, key, value, decay and update gate, for one head of one token."""
    a, b, a_log, dt_bias = gating
    qkv_stride, a_stride, b_stride = strides
    d = tl.arange(0, BLOCK_K)
    from_q = qkv + row * qkv_stride + head // (V_HEADS // K_HEADS) * K_DIM + d
    from_v = qkv + row * qkv_stride + 2 * K_HEADS * K_DIM + head * V_DIM + v
    q = tl.load(from_q, mask=there & (d < K_DIM), other=0.0).to(tl.float32)
    k = tl.load(from_q + K_HEADS * K_DIM, mask=there & (d < K_DIM), other=0.0).to(tl.float32)
    value = tl.load(from_v, mask=there & (v < V_DIM), other=0.0).to(tl.float32)
    g, beta = gates(a + row * a_stride + head, b + row * b_stride + head, a_log + head, dt_bias + head, there)
    return q * unit_factor(q, 0) * scale, k * unit_factor(k, 0), value, tl.exp(g), beta


@jit_general("num_reqs", "num_tokens", "max_count")
def _recurrent_kernel(
    qkv,
    gating,  # a, b, a_log, dt_bias
    states,
    requests,  # slots, starts, counts, positions
    out,
    num_reqs,
    num_tokens,
    max_count,
    qkv_stride,
    a_stride,
    b_stride,
    scale,
    RING: tl.constexpr,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    EMPTY: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Some columns of one head's state, held in registers over the tokens of a request."""
    COLUMN_TILES: tl.constexpr = (V_DIM + BLOCK_V - 1) // BLOCK_V
    head, request = tl.program_id(0) // COLUMN_TILES, tl.program_id(1)
    k, v = tl.arange(0, BLOCK_K), tl.program_id(0) % COLUMN_TILES * BLOCK_V + tl.arange(0, BLOCK_V)
    slot, start, count, position = describe(requests, request, num_reqs)
    count = tl.where(count <= max_count, count, 0)
    own = states + ((slot * RING * V_HEADS + head) * K_DIM + k)[:, None] * V_DIM + v[None, :]
    exists = (k < K_DIM)[:, None] & (v < V_DIM)[None, :]
    AFTER: tl.constexpr = V_HEADS * K_DIM * V_DIM  # distance to the next state of the ring
    is_known = exists & (count > 0) & (position > 0)
    state = tl.load(own + (position % RING).to(tl.int64) * AFTER, mask=is_known, other=0.0, cache_modifier=".cg")
    wait_for_last(EARLY)
    let_next_start(EARLY)
    strides = (qkv_stride, a_stride, b_stride)
    token = _load_token(start, count > 0, qkv, gating, strides, head, v, scale, K_HEADS, V_HEADS, K_DIM, V_DIM, BLOCK_K)
    for i in range(count):
        query, key, value, kept, beta = token
        # The next token is loaded while this one is processed.
        token = _load_token(
            start + i + 1,
            i + 1 < count,
            qkv,
            gating,
            strides,
            head,
            v,
            scale,
            K_HEADS,
            V_HEADS,
            K_DIM,
            V_DIM,
            BLOCK_K,
        )
        state *= kept
        # Both sums from the state before: query @ (state + key (x) news) is query @ state + (query @ key) * news.
        known, seen = tl.sum(state * key[:, None], 0), tl.sum(state * query[:, None], 0)
        news = (value - known) * beta
        state += key[:, None] * news[None, :]
        result = seen + tl.sum(query * key, 0) * news
        to = out + ((start + i) * V_HEADS + head) * V_DIM + v
        tl.store(to, result.to(out.dtype.element_ty), mask=v < V_DIM)
        entry = ((position + i + 1) % RING).to(tl.int64)
        tl.store(own + entry * AFTER, state, mask=exists & (i >= count - RING))
    begin, end = gap_before(requests, request, num_reqs, num_tokens)
    for at in range(begin, end, EMPTY):
        row = at + tl.arange(0, EMPTY)
        to = out + (row[:, None].to(tl.int64) * V_HEADS + head) * V_DIM + v[None, :]
        zeros = tl.zeros([EMPTY, BLOCK_V], out.dtype.element_ty)
        tl.store(to, zeros, mask=(row < end)[:, None] & (v < V_DIM)[None, :])
