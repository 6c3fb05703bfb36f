"""The short causal convolution in front of a gated delta net, each channel for itself, and silu after it.

A request's last inputs are in a ring: the one at position t in entry t modulo its length. The ring is longer than the
convolution's reach by the tokens of a step, so that inputs of rejected drafts never overwrite what a later step reads.

A program that reads old entries of a ring is the one that writes new ones, for the same request and channels, so no
other writes can come before its reads. It takes the first tokens of a request; later ones need no ring.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.device.operation import operation
from slipstream.kernels.request_rows import RequestStates, describe, find_request, gap_before, used_rows
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

_FEW = 16  # tokens of a request that its first program processes
_TILE = 32  # later tokens in one program


@operation(like="x", writes=("inputs",))
def causal_conv(
    x: Tensor,  # [num_tokens, channels], rows may be strided
    weight: Tensor,  # [channels, width], the last column is the token's own
    bias: Tensor | None,  # [channels]
    inputs: Tensor,  # [num_slots, ring, channels]; inputs before position 0 count as zero, whatever is stored
    requests: RequestStates,
    max_count: int,  # no request has more tokens
) -> Tensor:  # [num_tokens, channels]; zero for rows of no request
    if runs_triton(x):
        return _launch(x, weight, bias, inputs, requests, max_count)
    width, ring = weight.shape[1], inputs.shape[1]
    slots, starts, counts, positions = requests
    rows, request, number = used_rows(starts, counts)
    slot, position = slots.long()[request], positions.long()[request] + number
    wide = torch.promote_types(x.dtype, torch.float32)
    total = torch.zeros(rows.shape[0], x.shape[1], dtype=wide, device=x.device)
    for back in range(width):
        values = x[(rows - back).clamp(min=0)]
        old = number < back
        earlier = position[old] - back
        values[old] = torch.where((earlier >= 0)[:, None], inputs[slot[old], earlier % ring], 0).to(x.dtype)
        total.addcmul_(values.to(wide), weight[:, width - 1 - back].to(wide))
    if bias is not None:
        total += bias
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    out[rows] = F.silu(total).to(x.dtype)
    kept = number >= counts.long()[request] - ring
    inputs[slot[kept], position[kept] % ring] = x[rows[kept]].to(inputs.dtype)
    return out


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    inputs: Tensor,
    requests: RequestStates,
    max_count: int,
) -> Tensor:
    num_tokens, channels = x.shape
    num_reqs, width = requests.slots.shape[0], weight.shape[1]
    assert x.stride(1) == 1 and inputs.is_contiguous() and weight.is_contiguous()
    out = x.new_empty(x.shape)
    is_few = max_count <= _FEW
    first = next_power_of_2(max_count if is_few else width - 1)
    num_tiles = 0 if is_few or num_reqs == 0 else num_tokens // _TILE + num_reqs
    block = min(next_power_of_2(channels), 512, max(64, 1024 // first)) if is_few else 128
    # One program more than requests: for the rows of no request after the last.
    _conv_kernel[(num_reqs + 1 + num_tiles, -(-channels // block))](
        x,
        weight,
        bias,
        inputs,
        tuple(requests),
        out,
        num_reqs,
        num_tokens,
        channels,
        x.stride(0),
        inputs.shape[1],
        WIDTH=width,
        FIRST=first,
        TILE=_TILE,
        LATER=num_tiles > 0,
        BLOCK=block,
        num_warps=4,
        **early_start(x),
    )
    return out


@jit
def _store_silu(out, total, mask):
    tl.store(out, (total * tl.sigmoid(total)).to(out.dtype.element_ty), mask=mask)


@jit
def _first_tokens(
    x,
    weights,
    bias,
    inputs,
    out,
    described,
    channel,
    channels,
    token_stride,
    ring,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
):
    """The first tokens of a request, which read its ring; then its last inputs are written to the ring."""
    slot, start, count, position = described
    number, is_channel = tl.arange(0, FIRST), (channel < channels)[None, :]
    is_token = number < count
    own_ring = inputs + slot * ring * channels + channel[None, :]
    total = bias
    for back in tl.static_range(WIDTH):
        from_x = x + (start + number - back)[:, None] * token_stride + channel[None, :]
        value = tl.load(from_x, mask=(is_token & (number >= back))[:, None] & is_channel, other=0.0).to(tl.float32)
        if back > 0:
            earlier = position + number - back
            is_old = is_token & (number < back) & (earlier >= 0)
            from_ring = own_ring + (earlier % ring)[:, None].to(tl.int64) * channels
            value += tl.load(from_ring, mask=is_old[:, None] & is_channel, other=0.0).to(tl.float32)
        total += value * tl.load(weights + (WIDTH - 1 - back), mask=channel < channels, other=0.0).to(tl.float32)
    _store_silu(out + (start + number)[:, None] * channels + channel[None, :], total, is_token[:, None] & is_channel)
    # All threads must have read old entries before one overwrites them.
    tl.debug_barrier()
    for begin in range(tl.maximum(count - ring, 0), count, FIRST):
        later = begin + number
        mask = (later < count)[:, None] & is_channel
        given = tl.load(x + (start + later)[:, None] * token_stride + channel[None, :], mask=mask, other=0.0)
        to = own_ring + ((position + later) % ring)[:, None].to(tl.int64) * channels
        tl.store(to, given.to(inputs.dtype.element_ty), mask=mask)


@jit
def _later_tokens(
    x,
    weights,
    bias,
    out,
    start,
    count,
    begin,
    channel,
    channels,
    token_stride,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """A tile of tokens with all inputs that it needs before them."""
    number, is_channel = begin + tl.arange(0, TILE), (channel < channels)[None, :]
    mask = (number < count)[:, None] & is_channel
    total = bias
    for back in tl.static_range(WIDTH):
        from_x = x + (start + number - back)[:, None] * token_stride + channel[None, :]
        value = tl.load(from_x, mask=mask, other=0.0).to(tl.float32)
        total += value * tl.load(weights + (WIDTH - 1 - back), mask=channel < channels, other=0.0).to(tl.float32)
    _store_silu(out + (start + number)[:, None] * channels + channel[None, :], total, mask)


@jit_general("num_reqs", "num_tokens")
def _conv_kernel(
    x,
    weight,
    bias,
    inputs,
    requests,  # slots, starts, counts, positions
    out,
    num_reqs,
    num_tokens,
    channels,
    token_stride,
    ring,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    TILE: tl.constexpr,
    LATER: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Programs of requests, one for the padding at the end, then programs of tiles of later tokens."""
    program = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    weights = weight + channel * WIDTH
    added = tl.zeros([1, BLOCK], tl.float32)
    if bias is not None:
        added += tl.load(bias + channel, mask=channel < channels, other=0.0).to(tl.float32)[None, :]
    described = describe(requests, program, num_reqs)
    wait_for_last(EARLY)
    let_next_start(EARLY)
    if program <= num_reqs:
        _first_tokens(
            x,
            weights,
            added,
            inputs,
            out,
            described,
            channel,
            channels,
            token_stride,
            ring,
            WIDTH,
            FIRST,
        )
        begin, end = gap_before(requests, program, num_reqs, num_tokens)
        for at in range(begin, end, FIRST):
            row = at + tl.arange(0, FIRST)
            to = out + row[:, None].to(tl.int64) * channels + channel[None, :]
            zeros = tl.zeros([FIRST, BLOCK], out.dtype.element_ty)
            tl.store(to, zeros, mask=(row < end)[:, None] & (channel < channels)[None, :])
    elif LATER:
        tile = program - num_reqs - 1
        request = find_request(requests[1], num_reqs, tile, TILE)
        _, start, count, _ = describe(requests, request, num_reqs)
        number = FIRST + (tile - (start // TILE + request)) * TILE
        if number < count:
            _later_tokens(
                x,
                weights,
                added,
                out,
                start,
                count,
                number,
                channel,
                channels,
                token_stride,
                WIDTH,
                TILE,
            )
