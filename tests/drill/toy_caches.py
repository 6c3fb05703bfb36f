"""Two kinds of cache that the package does not know.

A kind is a spec, a backend and its operations; nothing else has to be told of it. ``Differences`` is paged: a page
keeps each key as its difference from the key before. ``RunningSums`` keeps a state for each request row, which must go
back to the last accepted token when drafts are rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from slipstream.attention.backend import AttentionLayer, Caps
from slipstream.attention.context import StepTokens
from slipstream.attention.grouped_query import NewHeads
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.cache_spec import CacheSpec, Shape
from slipstream.device.operation import operation
from slipstream.kernels.attention.rope_cache import rotate, rotation

FLOATS = ("float64", "float32")
DECAY = 0.75  # exact in binary


# --- paged: keys as differences -----------------------------------------------------------------------


@dataclass(frozen=True)
class Differences(CacheSpec):
    num_kv_heads: int
    head_dim: int

    def page_shapes(self, page_size: int) -> tuple[Shape, ...]:
        return (Shape((page_size, 2, self.num_kv_heads, self.head_dim)),)

    def open(self, setting: Any) -> Any:
        return DifferencesBackend({idx: pages for idx, (pages,) in setting.memory.items()})


class DifferencesBackend:
    caps: ClassVar[Caps] = Caps(FLOATS, host_lengths="none", graph_support="always")

    def __init__(self, pages: Mapping[int, Tensor]) -> None:
        self.pages = pages

    def step_buffers(self) -> tuple[Tensor, ...]:
        return ()

    def begin(self, tokens: StepTokens, shared: Any = None) -> DifferencesStep:
        return DifferencesStep(self, tokens)

    def can_share(self, other: Any) -> bool:
        return False

    def adapt(self, shared: Any, seq_starts: Tensor) -> Any:
        raise NotImplementedError("no drafter keeps differences")


@dataclass(slots=True)
class DifferencesStep:
    backend: DifferencesBackend
    tokens: StepTokens
    shared: None = None
    is_recorded: bool = False

    def run(self, layer: AttentionLayer, inputs: NewHeads) -> Tensor:
        q, k, v, cos_sin, _ = inputs
        positions, slot_mapping, common = self.tokens
        assert common is not None
        tables = (common.block_table, common.query_start_loc, common.query_lens, common.seq_lens)
        pages = self.backend.pages[layer.idx]
        return difference_attention(q, k, v, cos_sin, positions, slot_mapping, pages, *tables, layer.scale)

    def make_output(self, inputs: NewHeads) -> Tensor:
        return torch.zeros(inputs.q.shape, dtype=inputs.q.dtype, device=inputs.q.device)


@operation(like="q", writes=("pages",))
def difference_attention(
    q: Tensor,  # [num_tokens, num_heads, head_dim]
    k: Tensor,  # [num_tokens, num_kv_heads, head_dim]
    v: Tensor,  # [num_tokens, num_kv_heads, head_dim]
    cos_sin: Tensor,
    positions: Tensor,  # [num_tokens] int64
    slot_mapping: Tensor,  # [num_tokens] int64
    pages: Tensor,  # [num_pages + 1, page_size, 2, num_kv_heads, head_dim]
    block_table: Tensor,  # [num_reqs, max_pages] int32
    query_start_loc: Tensor,  # [num_reqs + 1] int32
    query_lens: Tensor,  # [num_reqs] int32
    seq_lens: Tensor,  # [num_reqs] int32
    scale: float,
) -> Tensor:
    turn, out = rotation.body(cos_sin, positions, q.dtype), torch.zeros_like(q)
    q, k = rotate(q, *turn), rotate(k, *turn)
    size, group = pages.shape[1], q.shape[1] // k.shape[1]
    rows = zip(query_start_loc.tolist(), query_lens.tolist(), seq_lens.tolist(), block_table, strict=False)
    for begin, count, length, table in rows:
        if not count or not length:
            continue
        for token in range(begin, begin + count):
            if (slot := int(slot_mapping[token])) >= 0:
                page, offset = pages[slot // size], slot % size
                page[offset, 0] = k[token] - page[:offset, 0].sum(0)
                page[offset, 1] = v[token]
        own = pages[table[: -(-length // size)].long()]
        keys = own[:, :, 0].cumsum(1).flatten(0, 1)[:length].repeat_interleave(group, 1)
        values = own[:, :, 1].flatten(0, 1)[:length].repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q[begin : begin + count], keys) * scale
        seen = torch.arange(length)[None, :] <= torch.arange(length - count, length)[:, None]
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[begin : begin + count] = torch.einsum("hqk,khd->qhd", weights, values)
    return out


# --- by row: a state that follows the text ------------------------------------------------------------


@dataclass(frozen=True)
class RunningSums(CacheSpec):
    size: int

    prefix_refusal: ClassVar[str] = "a running sum is kept of a request's end alone"
    drafter_refusal: ClassVar[str] = "keeps running sums"

    def row_shapes(self, num_drafts: int) -> tuple[Shape, ...]:
        # One for each token that the next step may go on from.
        return (Shape((1 + num_drafts, self.size), "wide"),)

    def open(self, setting: Any) -> Any:
        return RunningSumsBackend({idx: rows for idx, (rows,) in setting.memory.items()})


class SumLayer(NamedTuple):
    idx: int


class RunningSumsBackend:
    caps: ClassVar[Caps] = Caps(FLOATS, host_lengths="none", graph_support="always")

    def __init__(self, rows: Mapping[int, Tensor]) -> None:
        self.rows = rows

    def step_buffers(self) -> tuple[Tensor, ...]:
        return ()

    def begin(self, tokens: StepTokens, shared: Any = None) -> RunningSumsStep:
        assert tokens.common is not None
        return RunningSumsStep(self, tokens.common)

    def can_share(self, other: Any) -> bool:
        return False

    def adapt(self, shared: Any, seq_starts: Tensor) -> Any:
        raise NotImplementedError("no drafter keeps sums")


@dataclass(slots=True)
class RunningSumsStep:
    backend: RunningSumsBackend
    common: CommonAttentionMetadata
    shared: None = None
    is_recorded: bool = True

    def run(self, layer: SumLayer, inputs: Tensor) -> Tensor:
        common = self.common
        assert common.batch_rows is not None
        requests = (common.batch_rows, common.query_start_loc, common.query_lens, common.seq_lens)
        return running_sum(inputs, self.backend.rows[layer.idx], *requests)

    def make_output(self, inputs: Tensor) -> Tensor:
        return torch.zeros_like(inputs)


@operation(like="x", writes=("sums",))
def running_sum(
    x: Tensor,  # [num_tokens, size]
    sums: Tensor,  # [num_rows, 1 + num_drafts, size]: after position p in offset p modulo their number
    batch_rows: Tensor,  # [num_reqs] int32
    query_start_loc: Tensor,  # [num_reqs + 1] int32
    query_lens: Tensor,  # [num_reqs] int32
    seq_lens: Tensor,  # [num_reqs] int32
) -> Tensor:
    out, ring = torch.zeros_like(x), sums.shape[1]
    rows = zip(batch_rows.tolist(), query_start_loc.tolist(), query_lens.tolist(), seq_lens.tolist(), strict=False)
    for row, begin, count, length in rows:
        first = length - count
        state = sums[row, (first - 1) % ring].clone() if first else torch.zeros_like(sums[row, 0])
        for idx in range(count if length else 0):
            state = state * DECAY + x[begin + idx]
            out[begin + idx] = state
            sums[row, (first + idx) % ring] = state
    return out
