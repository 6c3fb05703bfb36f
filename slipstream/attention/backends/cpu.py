"""The backend for CPUs: requests with equal numbers of query tokens go through one batched product per layer.

The batch is split into slices of neighbouring requests. A slice is padded to its longest request, so a slice ends where
padding would waste too much, or where its gathered keys would exceed their memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, NoReturn

import numpy as np
import torch
from torch import Tensor

from slipstream.attention.backend import AttentionLayer, Caps
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.kernels import native
from slipstream.kernels.attention.batched_attention import batched_attention, hidden_keys, in_place_attention, key_rows

_MAX_SLICE_KEYS = 1 << 17  # limit on gathered keys of one slice: requests times padded length
_FEW_QUERIES = 8  # up to this many query tokens per request every C kernel is faster than matrix products
_MAX_WASTE = 2.0  # limit on padded work over real work of a slice


@dataclass(slots=True)
class Slice:
    """Neighbouring requests of a step that are computed together. Sizes are host bounds, values are on the device."""

    tokens: slice
    num_reqs: int
    max_query: int
    max_keys: int
    seq_lens: Tensor
    query_lens: Tensor
    block_table: Tensor
    seq_starts: Tensor | None
    is_causal: bool
    # Indices of the tokens in the padded [num_reqs, max_query] grid; None when the grid is full.
    grid: Tensor | None
    # Shared by all layers with the same heads or the same window; built by the first of them.
    rows: dict[int, Tensor] = field(default_factory=dict)
    hidden: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InPlace:
    """A step for the C kernels of attention or of all layers, which read pages in place."""

    common: CommonAttentionMetadata


class CpuBackend:
    """With ``in_place`` the C kernel reads pages in place, for queries in float32 only.

    For many query tokens per request it is fast if ``head_dim`` is a multiple of its vector size. With ``exact`` it
    computes every token as if it were the only one of its request.
    """

    caps: ClassVar[Caps] = Caps(
        dtypes=("float64", "float32", "bfloat16", "float16"),
        host_lengths="bound",
        graph_support="never",
        stacks_layers=True,
    )

    def __init__(self, page_size: int, in_place: bool = False, head_dim: int = 1, exact: bool = False) -> None:
        self._page_size, self._exact = page_size, exact
        self._max_in_place = 0
        assert in_place or not exact, "only the C kernel can"
        if in_place:
            lib = native.library()
            assert lib is not None
            is_slow = head_dim % lib.slip_panel_width() > 0 and not exact
            self._max_in_place = _FEW_QUERIES if is_slow else 1 << 30

    def step_buffers(self) -> tuple[Tensor, ...]:
        return ()

    def build(self, common: CommonAttentionMetadata) -> list[Slice] | InPlace:
        if common.max_query_len <= self._max_in_place:
            return InPlace(common)
        starts, bounds = common.query_start_loc_cpu, common.seq_lens_cpu_upper_bound
        query_lens = np.diff(starts)
        return [self._slice(common, query_lens, a, b) for a, b in _cut(query_lens.tolist(), bounds.tolist())]

    def starting_at(self, metadata: object, seq_starts: Tensor) -> NoReturn:
        raise RuntimeError("metadata is shared between graphs only, and a CPU has none")

    def in_place(self, metadata: list[Slice] | InPlace) -> CommonAttentionMetadata | None:
        return metadata.common if isinstance(metadata, InPlace) else None

    def _slice(self, common: CommonAttentionMetadata, query_lens: np.ndarray, first: int, end: int) -> Slice:
        own = query_lens[first:end]
        max_query = int(own.max())
        grid = None
        if (own != max_query).any():
            place = np.concatenate([i * max_query + np.arange(n) for i, n in enumerate(own)])
            grid = torch.from_numpy(place)
        starts = common.query_start_loc_cpu
        return Slice(
            tokens=slice(int(starts[first]), int(starts[end])),
            num_reqs=end - first,
            max_query=max_query,
            max_keys=int(common.seq_lens_cpu_upper_bound[first:end].max()),
            seq_lens=common.seq_lens[first:end],
            query_lens=common.query_lens[first:end],
            block_table=common.block_table[first:end],
            seq_starts=None if common.seq_starts is None else common.seq_starts[first:end],
            is_causal=common.is_causal,
            grid=grid,
        )

    def run(self, layer: AttentionLayer, q: Tensor, kv_cache: Tensor, metadata: list[Slice] | InPlace) -> Tensor:
        if isinstance(metadata, InPlace):
            common = metadata.common
            seen = (layer.scale, layer.window, common.is_causal)
            return in_place_attention(q, kv_cache, common.requests, *seen, self._exact)
        parts = [self._run_slice(layer, q[part.tokens], kv_cache, part) for part in metadata]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _run_slice(self, layer: AttentionLayer, q: Tensor, kv_cache: Tensor, part: Slice) -> Tensor:
        page_size, kv_heads = self._page_size, layer.num_kv_heads
        if kv_heads not in part.rows:
            part.rows[kv_heads] = key_rows(
                part.block_table, part.seq_lens, part.max_keys, kv_heads, page_size, part.seq_starts
            )
        if layer.window not in part.hidden:
            sizes = (part.max_query, part.max_keys, layer.window)
            lens = (part.seq_lens, part.query_lens)
            part.hidden[layer.window] = hidden_keys(*lens, *sizes, part.seq_starts, part.is_causal)
        shape = (part.num_reqs, part.max_query, layer.num_heads, layer.head_dim)
        if part.grid is None:
            padded = q.reshape(shape)
        else:
            padded = q.new_zeros(shape)
            padded.view(-1, *shape[2:]).index_copy_(0, part.grid, q)
        keys = (part.rows[kv_heads], part.hidden[layer.window])
        out = batched_attention(padded, kv_cache, *keys, layer.scale, part.seq_starts is not None)
        out = out.reshape(-1, *shape[2:])
        return out if part.grid is None else out.index_select(0, part.grid)


def _cut(query_lens: list[int], bounds: list[int]) -> Iterator[tuple[int, int]]:
    """Ranges of neighbouring requests whose padding wastes little and whose keys fit."""
    first = 0
    while first < len(query_lens):
        end, real = first, 0
        max_query = max_keys = 0
        while end < len(query_lens):
            wider, longer = max(max_query, query_lens[end]), max(max_keys, bounds[end])
            count, more = end + 1 - first, real + query_lens[end] * bounds[end]
            too_long = count * longer > _MAX_SLICE_KEYS
            wasteful = count * wider * longer > _MAX_WASTE * more + 4096
            if end > first and (too_long or wasteful):
                break
            max_query, max_keys, real, end = wider, longer, more, end + 1
        yield first, end
        first = end
