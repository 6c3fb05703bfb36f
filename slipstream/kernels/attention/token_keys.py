"""Which keys each token of a pass sees, and of which request they are.

It depends on the step alone, so it is found once for all layers. Rows of neighbouring tokens can be used by themselves:
a long prompt is computed in ranges of its tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation
from slipstream.kernels.attention.paged_attention import PagedRequests
from slipstream.kernels.triton_jit import jit_general, runs_triton, tl

_TOKENS_AT_ONCE = 16  # of one program
_REQUESTS_AT_ONCE = 128


class TokenKeys(NamedTuple):
    """Of each token its request and a range of slots; an empty one, 0 to 0 of request 0, if it sees nothing."""

    requests: Tensor  # [num_tokens] int32
    firsts: Tensor  # [num_tokens] int32
    ends: Tensor  # [num_tokens] int32

    def of(self, tokens: slice) -> TokenKeys:
        return TokenKeys(self.requests[tokens], self.firsts[tokens], self.ends[tokens])


def _shape(num_tokens: int) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
    spec = TensorSpec((num_tokens,), torch.int32)
    return spec, spec, spec


@operation(_shape)
def find_token_keys(requests: PagedRequests, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:  # as in TokenKeys
    if runs_triton(requests.seq_lens):
        return _launch(requests, num_tokens)
    loc, query_lens, seq_lens, _, seq_starts = requests
    token = torch.arange(num_tokens, dtype=loc.dtype)
    # The last request that begins at the token or before; those in front of it may have no tokens.
    ids = torch.searchsorted(loc, token, right=True) - 1
    exists = (ids >= 0) & (ids < seq_lens.shape[0])
    ids = torch.where(exists, ids, 0)
    query = token - loc[ids]
    ends = seq_lens[ids] - query_lens[ids] + query + 1
    firsts = torch.zeros_like(ends) if seq_starts is None else seq_starts[ids]
    sees = exists & (query < query_lens[ids]) & (firsts < ends)
    ids, firsts, ends = (torch.where(sees, x, 0).int() for x in (ids, firsts, ends))
    return ids, firsts, ends


def _launch(requests: PagedRequests, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    device = requests.seq_lens.device
    ids, firsts, ends = (torch.empty(num_tokens, dtype=torch.int32, device=device) for _ in range(3))
    _token_keys_kernel[(-(-num_tokens // _TOKENS_AT_ONCE),)](
        (requests.query_start_loc, requests.query_lens, requests.seq_lens, requests.seq_starts),
        (ids, firsts, ends),
        requests.seq_lens.shape[0],
        num_tokens,
        STARTS=requests.seq_starts is not None,
        BLOCK_T=_TOKENS_AT_ONCE,
        BLOCK_B=_REQUESTS_AT_ONCE,
        num_warps=4,
    )
    return ids, firsts, ends


@jit_general("num_reqs", "num_tokens")
def _token_keys_kernel(
    tables,  # query_start_loc, query_lens, seq_lens, seq_starts if there are
    found,  # requests, firsts, ends
    num_reqs,
    num_tokens,
    STARTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    query_start_loc, query_lens, seq_lens, seq_starts = tables
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    begun = tl.zeros([BLOCK_T], tl.int32)  # how many requests begin at the token or before, the end being one more
    for first in range(0, num_reqs + 1, BLOCK_B):
        b = first + tl.arange(0, BLOCK_B)
        start = tl.load(query_start_loc + b, mask=b <= num_reqs, other=2147483647)
        begun += tl.sum((start[None, :] <= token[:, None]).to(tl.int32), 1)
    exists = (begun > 0) & (begun <= num_reqs) & (token < num_tokens)
    request = tl.where(exists, begun - 1, 0)
    query = token - tl.load(query_start_loc + request, mask=exists, other=0)
    query_len = tl.load(query_lens + request, mask=exists, other=0)
    end = tl.load(seq_lens + request, mask=exists, other=0) - query_len + query + 1
    start = tl.zeros([BLOCK_T], tl.int32)
    if STARTS:
        start = tl.load(seq_starts + request, mask=exists, other=0)
    sees = exists & (query < query_len) & (start < end)
    tl.store(found[0] + token, tl.where(sees, request, 0), mask=token < num_tokens)
    tl.store(found[1] + token, tl.where(sees, start, 0), mask=token < num_tokens)
    tl.store(found[2] + token, tl.where(sees, end, 0), mask=token < num_tokens)
