"""Attention of a step with prompts and decodes: each by its own kernel, into one result.

A decoding request has few queries and many keys, so its keys are split among programs; a prompt has many queries, and
one program for a tile of them. Decodes come first in a batch, so that each kind is one range of requests and of tokens.
Where the keys of a decode are split depends on their positions alone, so its result is the same, bit for bit, whatever
prompts run beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import operation
from slipstream.kernels.attention.paged_attention import PagedRequests, paged_attention
from slipstream.kernels.attention.tma_attention import can_use_tma, launch_tma
from slipstream.kernels.attention.triton_attention import AttentionResult, can_split, launch_attention
from slipstream.kernels.triton_jit import runs_triton


@operation(like="q")
def mixed_attention(
    q: Tensor,  # [num_tokens, num_heads, head_dim], tokens padded
    kv_cache: Tensor,  # [num_pages, 2, num_kv_heads, page_size, head_dim]
    decodes: PagedRequests,  # with the first tokens, equally many for each
    prompts: PagedRequests,  # padded; their tokens are counted from the first after the decodes
    query_len: int,  # of every decode
    scale: float,
    window: int,
    with_tma: bool = False,  # the kernel for prompts: ``tma_attention``, where it serves this batch
) -> Tensor:  # as paged_attention; padding tokens are zero
    num_tokens = decodes.seq_lens.shape[0] * query_len
    if not runs_triton(q):
        first = paged_attention.body(q[:num_tokens], kv_cache, decodes, scale, window)
        return torch.cat([first, paged_attention.body(q[num_tokens:], kv_cache, prompts, scale, window)])
    assert can_split(query_len, q.shape[1] // kv_cache.shape[2])
    q, out = q.contiguous(), torch.empty(q.shape, dtype=q.dtype, device=q.device)
    out[num_tokens:].zero_()
    own, rest = slice(num_tokens), slice(num_tokens, None)
    launch_attention(q[own], kv_cache, decodes, scale, window, query_len, AttentionResult(out[own]))
    if with_tma and can_use_tma(q, kv_cache, prompts):
        launch_tma(q[rest], kv_cache, prompts, scale, window, out[rest])
    else:
        launch_attention(q[rest], kv_cache, prompts, scale, window, 0, AttentionResult(out[rest]))
    return out
