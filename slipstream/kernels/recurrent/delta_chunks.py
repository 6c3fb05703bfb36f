"""The gated delta rule over chunks of tokens, on a GPU; ``delta_rule`` defines it.

The updates of the tokens of a chunk solve a triangular system: token i must subtract what the tokens before it have
added for its key. One launch prepares all chunks in parallel: the inverse of that system, and the weight of each
token's update for each query. Another launch processes the chunks of each request in order, with some columns of a
head's state in registers:

    news = inverse @ (value - decay * key @ state);  out = decay * query @ state + sees @ news;
    state = decay * state + key^T @ (decay * news)

Queries and keys enter products unnormalised. Their lengths are factors of rows, applied to the results. The host
knows neither counts nor positions: grids are sized by tokens and requests, and programs without work return at once.

Products of float32 are three tensor-core products ("tf32x3"), which is nearly as exact; the inverse is float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream.kernels.request_rows import RequestStates, describe, find_request
from slipstream.kernels.triton_jit import jit, jit_general, next_power_of_2, tl

if TYPE_CHECKING:
    from slipstream.kernels.recurrent.delta_rule import DeltaTokens

CHUNK = 64
# Columns of a state in one program. With fewer, and keys of 64 or more, Triton 3.6 generates wrong code for Hopper.
_COLUMNS = 64
_FACTORS = 5  # of a token: of its query, of its key, of its news at the end, of the state, how much is learnt


def launch_chunks(tokens: DeltaTokens, states: Tensor, requests: RequestStates, few: int, out: Tensor) -> None:
    """``chunked_delta_rule`` for requests of more than a few tokens; see there for the shapes."""
    qkv, a, b, *decay = tokens
    num_tokens, num_reqs = qkv.shape[0], requests.slots.shape[0]
    _, ring, v_heads, k_dim, v_dim = states.shape
    if num_tokens <= few or num_reqs == 0:
        return
    assert states.is_contiguous() and states.dtype == torch.float32
    assert qkv.stride(1) == a.stride(1) == b.stride(1) == 1
    inverse, sees = (qkv.new_empty(num_tokens, v_heads, CHUNK) for _ in range(2))
    below = torch.empty(inverse.shape, dtype=torch.float32, device=qkv.device)
    factors = torch.empty(num_tokens, v_heads, _FACTORS, dtype=torch.float32, device=qkv.device)
    columns = _COLUMNS if k_dim > 32 else max(16, min(_COLUMNS, next_power_of_2(v_dim)))
    options: dict[str, Any] = {
        "K_HEADS": (qkv.shape[1] - v_heads * v_dim) // (2 * k_dim),
        "V_HEADS": v_heads,
        "K_DIM": k_dim,
        "BLOCK_K": max(16, next_power_of_2(k_dim)),
        "SIZE": CHUNK,
    }
    is_wide = qkv.element_size() > 2
    _prepare_kernel[(v_heads, num_tokens // CHUNK + num_reqs)](
        qkv,
        (a, b, *decay),
        tuple(requests),
        below,
        inverse,
        sees,
        factors,
        num_reqs,
        few,
        qkv.stride(0),
        a.stride(0),
        b.stride(0),
        k_dim**-0.5,
        num_warps=8 if is_wide else 4,
        num_stages=1,
        **options,
    )
    _scan_kernel[(v_heads * -(-v_dim // columns), num_reqs)](
        qkv,
        states,
        tuple(requests),
        inverse,
        sees,
        factors,
        out,
        num_reqs,
        few,
        qkv.stride(0),
        RING=ring,
        V_DIM=v_dim,
        BLOCK_V=columns,
        num_warps=8 if is_wide else 4,
        num_stages=1 if is_wide else 2,
        **options,
    )


@jit
def unit_factor(x, AXIS: tl.constexpr):
    """The factor that normalises vectors to unit length, up to an epsilon."""
    return tl.rsqrt(tl.sum(x * x, AXIS) + 1e-6)


@jit
def gates(a, b, a_log, dt_bias, there):
    """Logarithm of the decay of the state, and the update gate; 0 and an arbitrary value for padding."""
    x = tl.load(a, mask=there, other=0.0).to(tl.float32) + tl.load(dt_bias).to(tl.float32)
    softplus = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
    g = tl.where(there, -tl.exp(tl.load(a_log).to(tl.float32)) * softplus, 0.0)
    return g, tl.sigmoid(tl.load(b, mask=there, other=0.0).to(tl.float32))


@jit
def _block(lower, row_block, column_block, stride, used):
    """16 rows and columns of the numbers below the diagonal, which ``_prepare_kernel`` has left."""
    row, column = row_block * 16 + tl.arange(0, 16), column_block * 16 + tl.arange(0, 16)
    return tl.load(lower + row[:, None] * stride + column[None, :], mask=(row < used)[:, None], other=0.0)


@jit
def _put(inverse, values, row_block, column_block, stride, used):
    row, column = row_block * 16 + tl.arange(0, 16), column_block * 16 + tl.arange(0, 16)
    to = inverse + row[:, None] * stride + column[None, :]
    tl.store(to, values.to(inverse.dtype.element_ty), mask=(row < used)[:, None])


@jit
def _times(left, right):
    return tl.dot(left, right, input_precision="ieee")


@jit
def _pick(blocks, block):
    return tl.sum(tl.where((tl.arange(0, 4) == block)[:, None, None], blocks, 0.0), 0)


@jit
def _invert(lower, inverse, stride, used):
    """Of a matrix [64, 64] with these numbers below a diagonal of ones; above it nothing is written.

    Blocks on the diagonal row by row, all four at once, the others by products of blocks. All in float32: nothing here
    may grow, as powers of the matrix would.
    """
    block, row = tl.arange(0, 4)[:, None, None], tl.arange(0, 16)
    i, j = row[None, :, None], row[None, None, :]
    at = (block * 16 + i) * stride + block * 16 + j
    below = tl.load(lower + at, mask=block * 16 + i < used, other=0.0)
    blocks = tl.where(i == j, 1.0, tl.zeros([4, 16, 16], tl.float32))
    for line in range(1, 16):
        numbers = tl.sum(tl.where(i == line, below, 0.0), 1)
        blocks -= tl.where(i == line, tl.sum(numbers[:, :, None] * blocks, 1)[:, None, :], 0.0)
    tl.store(inverse + at, blocks.to(inverse.dtype.element_ty), mask=block * 16 + i < used)
    x00, x11, x22, x33 = _pick(blocks, 0), _pick(blocks, 1), _pick(blocks, 2), _pick(blocks, 3)
    x10 = -_times(x11, _times(_block(lower, 1, 0, stride, used), x00))
    _put(inverse, x10, 1, 0, stride, used)
    l21, l32 = _block(lower, 2, 1, stride, used), _block(lower, 3, 2, stride, used)
    x21 = -_times(x22, _times(l21, x11))
    _put(inverse, x21, 2, 1, stride, used)
    _put(inverse, -_times(x33, _times(l32, x22)), 3, 2, stride, used)
    x20 = -_times(x22, _times(_block(lower, 2, 0, stride, used), x00) + _times(l21, x10))
    _put(inverse, x20, 2, 0, stride, used)
    l31 = _block(lower, 3, 1, stride, used)
    _put(inverse, -_times(x33, _times(l31, x11) + _times(l32, x21)), 3, 1, stride, used)
    rest = _times(_block(lower, 3, 0, stride, used), x00) + _times(l31, x10) + _times(l32, x20)
    _put(inverse, -_times(x33, rest), 3, 0, stride, used)


@jit_general("num_reqs", "few")
def _prepare_kernel(
    qkv,
    gating,  # a, b, a_log, dt_bias
    requests,  # slots, starts, counts, positions
    below,  # [num_tokens, v_heads, SIZE] float32: the system of each chunk below its diagonal of ones
    inverse,  # [num_tokens, v_heads, SIZE]
    sees,  # [num_tokens, v_heads, SIZE]
    factors,  # [num_tokens, v_heads, 5]
    num_reqs,
    few,
    qkv_stride,
    a_stride,
    b_stride,
    scale,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One head of one chunk."""
    head = tl.program_id(0)
    request = find_request(requests[1], num_reqs, tl.program_id(1), SIZE)
    _, start, count, _ = describe(requests, request, num_reqs)
    chunk = tl.program_id(1) - (start // SIZE + request)
    number, d = tl.arange(0, SIZE), tl.arange(0, BLOCK_K)
    if (count <= few) | (chunk * SIZE >= count):
        return
    first = start + chunk * SIZE
    alive, row = chunk * SIZE + number < count, first + number
    a, b, a_log, dt_bias = gating
    g, beta = gates(a + row * a_stride + head, b + row * b_stride + head, a_log + head, dt_bias + head, alive)
    # Sums in two parts: sixteenths, which are exact, and the rest. So after a token that forgets nearly all, their
    # differences are still those of the others. What is smaller than exp(-128) is zero in float32.
    g = tl.maximum(g, -128.0)
    coarse = tl.floor(g * 16.0) * 0.0625
    fine = g - coarse
    left = (tl.sum(coarse, 0) - tl.cumsum(coarse, 0)) + (tl.sum(fine, 0) - tl.cumsum(fine, 0))
    whole, coarse, fine = tl.sum(g, 0), tl.cumsum(coarse, 0), tl.cumsum(fine, 0)
    from_q = qkv + first * qkv_stride + head // (V_HEADS // K_HEADS) * K_DIM
    from_q += number[:, None] * qkv_stride + d[None, :]
    exists = alive[:, None] & (d < K_DIM)[None, :]
    k = tl.load(from_q + K_HEADS * K_DIM, mask=exists, other=0.0)
    k_factor = unit_factor(k.to(tl.float32), 1)
    earlier = number[:, None] - number[None, :]
    decay = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
    decay = tl.exp(tl.where(earlier >= 0, decay, float("-inf"))) * k_factor[None, :]
    lower = tl.dot(k, tl.trans(k), input_precision="tf32x3") * decay * (k_factor * beta)[:, None]
    pair = number[:, None] * (V_HEADS * SIZE) + number[None, :]
    own = first * V_HEADS + head
    tl.store(below + own * SIZE + pair, tl.where(earlier > 0, lower, 0.0), mask=alive[:, None])
    q = tl.load(from_q, mask=exists, other=0.0)
    q_factor = unit_factor(q.to(tl.float32), 1) * scale
    seen = tl.dot(q, tl.trans(k), input_precision="tf32x3") * decay * q_factor[:, None]
    tl.store(sees + own * SIZE + pair, seen.to(sees.dtype.element_ty), mask=alive[:, None])
    to = factors + (own + number * V_HEADS) * 5
    tl.store(to, q_factor * tl.exp(coarse + fine), mask=alive)
    tl.store(to + 1, k_factor * tl.exp(coarse + fine), mask=alive)
    tl.store(to + 2, k_factor * tl.exp(left), mask=alive)
    tl.store(to + 3, tl.exp(whole) + tl.zeros([SIZE], tl.float32), mask=alive)
    tl.store(to + 4, beta, mask=alive)
    # Blocks are read by other threads than those that have stored them.
    tl.debug_barrier()
    _invert(below + own * SIZE, inverse + own * SIZE, V_HEADS * SIZE, count - chunk * SIZE)


@jit_general("num_reqs", "few")
def _scan_kernel(
    qkv,
    states,
    requests,
    inverse,
    sees,
    factors,
    out,
    num_reqs,
    few,
    qkv_stride,
    RING: tl.constexpr,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Some columns of one head's state through the chunks of a request."""
    COLUMN_TILES: tl.constexpr = (V_DIM + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(0) // COLUMN_TILES
    slot, start, count, position = describe(requests, tl.program_id(1), num_reqs)
    if count <= few:
        return
    number, d = tl.arange(0, SIZE), tl.arange(0, BLOCK_K)
    v = tl.program_id(0) % COLUMN_TILES * BLOCK_V + tl.arange(0, BLOCK_V)
    held = states + ((slot * RING * V_HEADS + head) * K_DIM + d)[:, None] * V_DIM + v[None, :]
    is_state = (d < K_DIM)[:, None] & (v < V_DIM)[None, :]
    AFTER: tl.constexpr = V_HEADS * K_DIM * V_DIM
    entry = (position % RING).to(tl.int64)
    state = tl.load(held + entry * AFTER, mask=is_state & (position > 0), other=0.0)
    kind = qkv.dtype.element_ty
    for begin in range(0, count, SIZE):
        # Places in a chunk are small numbers, added to one address in 64 bits.
        first, alive = start + begin, begin + number < count
        rows = qkv + first * qkv_stride
        from_q = rows + head // (V_HEADS // K_HEADS) * K_DIM + (number[:, None] * qkv_stride + d[None, :])
        from_v = rows + 2 * K_HEADS * K_DIM + head * V_DIM + (number[:, None] * qkv_stride + v[None, :])
        is_key, is_value = alive[:, None] & (d < K_DIM)[None, :], alive[:, None] & (v < V_DIM)[None, :]
        key = tl.load(from_q + K_HEADS * K_DIM, mask=is_key, other=0.0)
        value = tl.load(from_v, mask=is_value, other=0.0).to(tl.float32)
        own, place = first * V_HEADS + head, number * V_HEADS
        pairs = place[:, None] * SIZE + number[None, :]
        is_pair = alive[:, None] & (number[:, None] >= number[None, :])
        solved = tl.load(inverse + own * SIZE + pairs, mask=is_pair, other=0.0)
        known = tl.load(factors + own * 5 + place * 5 + 1, mask=alive, other=0.0)
        beta = tl.load(factors + own * 5 + place * 5 + 4, mask=alive, other=0.0)
        rounded = state.to(kind)
        value -= tl.dot(key, rounded, input_precision="tf32x3") * known[:, None]
        news = tl.dot(solved, (value * beta[:, None]).to(kind), input_precision="tf32x3")
        query = tl.load(from_q, mask=is_key, other=0.0)
        result = tl.dot(query, rounded, input_precision="tf32x3")
        result *= tl.load(factors + own * 5 + place * 5, mask=alive, other=0.0)[:, None]
        seen = tl.load(sees + own * SIZE + pairs, mask=is_pair, other=0.0)
        result = tl.dot(seen, news.to(kind), result, input_precision="tf32x3")
        tl.store(out + own * V_DIM + place[:, None] * V_DIM + v[None, :], result.to(kind), mask=is_value)
        lasting = (news * tl.load(factors + own * 5 + place * 5 + 2, mask=alive, other=0.0)[:, None]).to(kind)
        state *= tl.load(factors + own * 5 + 3)
        state = tl.dot(tl.trans(key), lasting, state, input_precision="tf32x3")
    tl.store(held + ((position + count) % RING).to(tl.int64) * AFTER, state, mask=is_state)
