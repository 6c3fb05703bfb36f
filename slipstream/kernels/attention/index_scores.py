"""How much each key concerns each token, by a sparse indexer: a sum over heads of what is positive of their products.

Heads have weights of either sign, so a sum has any sign. A token's scores are computed by programs that share its keys
out in blocks, which begin at fixed positions: a score does not depend on how many programs there are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation
from slipstream.kernels.attention.token_keys import TokenKeys
from slipstream.kernels.triton_jit import jit_general, next_power_of_2, runs_triton, tl

_WANTED_PROGRAMS = 1024
_MAX_PRODUCTS = 1 << 24  # of a definition at once: tokens times heads times keys


class IndexQueries(NamedTuple):
    """Of the tokens whose keys are to be chosen, which may be a range of a pass's."""

    q: Tensor  # [num_tokens, num_heads, dim], rotated
    weights: Tensor  # [num_tokens, num_heads] float32 at least, of any sign


def _shape(queries: IndexQueries, max_keys: int) -> TensorSpec:
    return TensorSpec((queries.q.shape[0], max_keys), torch.promote_types(queries.q.dtype, torch.float32))


@operation(_shape)
def index_scores(
    queries: IndexQueries,
    keys: Tensor,  # [num_pages, page_size, dim]
    block_table: Tensor,  # [num_reqs, max_pages] int32
    token_keys: TokenKeys,  # of the same tokens
    max_keys: int,  # a bound on the end of what a token sees
    scale: float,  # of products
) -> Tensor:  # [num_tokens, max_keys]; -inf for keys that a token does not see
    num_tokens, num_heads, _ = queries.q.shape
    kind = torch.promote_types(queries.q.dtype, torch.float32)
    scores = torch.full((num_tokens, max_keys), float("-inf"), dtype=kind, device=keys.device)
    if runs_triton(keys):
        write_scores(queries, keys, block_table, token_keys, scale, 0, scores)
        return scores
    ids, firsts, ends = token_keys
    for request in sorted(set(ids[ends > 0].tolist())):
        own = ((ids == request) & (ends > 0)).nonzero().squeeze(1)
        slot = torch.arange(int(ends[own].max()))
        pages = block_table[request].long()[slot // keys.shape[1]]
        found = keys[pages, slot % keys.shape[1]].to(kind).T
        for tokens in torch.split(own, max(1, _MAX_PRODUCTS // (num_heads * len(slot)))):
            products = (queries.q[tokens].to(kind).flatten(0, 1) @ found).view(len(tokens), num_heads, -1)
            sums = queries.weights[tokens].to(kind).unsqueeze(1) @ products.mul_(scale).relu_()
            sees = (slot >= firsts[tokens].unsqueeze(1)) & (slot < ends[tokens].unsqueeze(1))
            scores[tokens, : len(slot)] = sums.squeeze(1).masked_fill_(~sees, float("-inf"))
    return scores


def write_scores(
    queries: IndexQueries,
    keys: Tensor,
    block_table: Tensor,
    token_keys: TokenKeys,
    scale: float,
    enough: int,  # tokens that see at most so many keys have no scores written
    scores: Tensor,  # [num_tokens, max_keys] float32; only what a token sees is written
) -> None:
    """By Triton. What is not written is not read by ``choose_positions``."""
    (num_tokens, num_heads, dim), max_keys = queries.q.shape, scores.shape[1]
    assert queries.q.stride(2) == queries.weights.stride(1) == keys.stride(2) == scores.stride(1) == 1
    narrow = queries.q.element_size() <= 2
    # A score is the same in every launch: the size of a block does not depend on the batch.
    block_k = 128 if narrow else 32
    splits = min(-(-max_keys // block_k), -(-_WANTED_PROGRAMS // max(1, num_tokens)))
    _score_kernel[(num_tokens, splits)](
        queries,
        (queries.q.stride(0), queries.q.stride(1), queries.weights.stride(0)),
        (keys, keys.stride(0), keys.stride(1)),
        (block_table, block_table.stride(0)),
        token_keys,
        scores,
        scores.stride(0),
        scale,
        enough,
        max_keys,
        NUM_HEADS=num_heads,
        DIM=dim,
        BLOCK_N=max(16, next_power_of_2(num_heads)),
        BLOCK_D=max(16, next_power_of_2(dim)),
        BLOCK_K=block_k,
        PAGE_SIZE=keys.shape[1],
        num_warps=4,
        num_stages=2,
    )


@jit_general("enough", "max_keys")
def _score_kernel(
    queries,  # q, weights
    strides,  # of tokens and heads of q, of tokens of weights
    cached,  # keys, the stride of pages and that of slots
    table,  # of pages, the stride of requests
    token_keys,  # requests, firsts, ends
    scores,
    score_stride,
    scale,
    enough,
    max_keys,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Every so many blocks of the keys that one token sees."""
    token = tl.program_id(0).to(tl.int64)
    keys, page_stride, slot_stride = cached
    begin, end = tl.load(token_keys[1] + token), tl.minimum(tl.load(token_keys[2] + token), max_keys)
    if end - begin > enough:
        pages = table[0] + tl.load(token_keys[0] + token).to(tl.int64) * table[1]
        n, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
        is_head = n < NUM_HEADS
        from_q = queries[0] + token * strides[0] + n.to(tl.int64)[:, None] * strides[1] + d[None, :]
        q = tl.load(from_q, mask=is_head[:, None] & (d < DIM)[None, :], other=0.0)
        weight = tl.load(queries[1] + token * strides[2] + n, mask=is_head, other=0.0).to(tl.float32)
        row = scores + token * score_stride
        block = begin // BLOCK_K + tl.program_id(1)
        for first in range(block * BLOCK_K, end, tl.num_programs(1) * BLOCK_K):
            slot = first + tl.arange(0, BLOCK_K)
            is_seen = (slot >= begin) & (slot < end)
            page = tl.load(pages + slot // PAGE_SIZE, mask=is_seen, other=0).to(tl.int64)
            entry = (keys + page * page_stride + (slot % PAGE_SIZE) * slot_stride)[:, None] + d[None, :]
            key = tl.load(entry, mask=is_seen[:, None] & (d < DIM)[None, :], other=0.0).to(q.dtype)
            product = tl.dot(q, tl.trans(key), input_precision="ieee") * scale
            product = tl.where(product < 0.0, 0.0, product)
            tl.store(row + slot, tl.sum(product * weight[:, None], 0), mask=is_seen)
