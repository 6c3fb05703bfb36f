"""The type of each token where two texts are encoded together: 0 in the first, 1 in the second."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from slipstream.device.operation import operation
from slipstream.kernels.triton_jit import early_start, jit_general, let_next_start, runs_triton, tl, wait_for_last

_TOKENS = 128


class TypedRequests(NamedTuple):
    """A step's requests."""

    positions: Tensor  # [padded_tokens] int64, of all tokens of the step
    batch_rows: Tensor  # [padded_reqs] int32
    query_start_loc: Tensor  # [padded_reqs + 1] int32
    query_lens: Tensor  # [padded_reqs] int32


@operation(writes=("out",))
def token_types(
    requests: TypedRequests,
    second_from: Tensor,  # [num_rows] int32: the position at which each request's second text begins; 0: it has none
    # written:
    out: Tensor,  # [padded_tokens] int32; 0 where no token is computed
) -> None:
    if runs_triton(out):
        num_reqs = requests.query_lens.shape[0]
        out.zero_()
        _token_types_kernel[(num_reqs,)](requests, second_from, out, TOKENS=_TOKENS, num_warps=4, **early_start(out))
        return
    out.zero_()
    columns = (requests.batch_rows, requests.query_start_loc[:-1], requests.query_lens)
    for row, start, count in zip(*(column.tolist() for column in columns), strict=True):
        begins = int(second_from[row])
        if begins:
            out[start : start + count] = (requests.positions[start : start + count] >= begins).int()


@jit_general()
def _token_types_kernel(requests, second_from, out, TOKENS: tl.constexpr, EARLY: tl.constexpr):
    """One program for a request."""
    wait_for_last(EARLY)
    let_next_start(EARLY)
    positions, batch_rows, query_start_loc, query_lens = requests
    request = tl.program_id(0)
    begins = tl.load(second_from + tl.load(batch_rows + request).to(tl.int64))
    start = tl.load(query_start_loc + request).to(tl.int64)
    count = tl.where(begins > 0, tl.load(query_lens + request), 0)
    for first in range(0, count, TOKENS):
        token = first + tl.arange(0, TOKENS)
        exists = token < count
        position = tl.load(positions + start + token, mask=exists, other=0)
        tl.store(out + start + token, (position >= begins).to(tl.int32), mask=exists)
