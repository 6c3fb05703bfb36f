"""Passes of one attention backend over given caches, for tests that need no engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from slipstream.attention.backend import AttentionBackend
from slipstream.attention.context import AttentionContext, StepTokens
from slipstream.attention.grouped_query import GroupedQueryStep, serve_layers


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
