"""Passes of one attention backend over given caches, for tests that need no engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.attention.backend import AttentionBackend
from slipstream.attention.context import AttentionContext, StepTokens
from slipstream.attention.grouped_query import GroupedQueryStep, serve_layers
from slipstream.attention.metadata import CommonAttentionMetadata


def context_of(
    backend: AttentionBackend,
    metadata: Any,
    kv_caches: Sequence[Tensor],  # one a layer
    positions: Tensor,
    slot_mapping: Tensor,
    taps: Mapping[int, Tensor] | None = None,
) -> AttentionContext:
    """With metadata that the backend has built already."""
    return serve_layers(backend, kv_caches).begin(StepTokens(positions, slot_mapping, None), taps, [metadata])


def step_of(context: AttentionContext) -> GroupedQueryStep:
    """Of a context with grouped-query layers alone."""
    (step,) = context.group_steps
    assert isinstance(step, GroupedQueryStep)
    return step


def one_prompt(num_tokens: int, page_size: int) -> StepTokens:
    """A pass over all tokens of one sequence, in pages from the first on that may be used."""
    starts, positions = np.array([0, num_tokens], dtype=np.int32), torch.arange(num_tokens)
    count = torch.tensor([num_tokens], dtype=torch.int32)
    common = CommonAttentionMetadata(
        num_reqs=1,
        num_actual_tokens=num_tokens,
        max_query_len=num_tokens,
        query_start_loc=torch.from_numpy(starts),
        query_start_loc_cpu=starts,
        query_lens=count,
        seq_lens=count,
        seq_lens_cpu_upper_bound=starts[1:],
        block_table=torch.arange(1, -(-num_tokens // page_size) + 1, dtype=torch.int32).unsqueeze(0),
        slot_mapping=positions + page_size,
        batch_rows=torch.zeros(1, dtype=torch.int32),
    )
    return StepTokens(positions, common.slot_mapping, common)
