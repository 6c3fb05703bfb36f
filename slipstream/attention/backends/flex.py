"""The backend for arbitrary masks, on torch's ``flex_attention``.

It splits a step's tokens and pages into blocks, and decides which blocks of keys each block of tokens attends to;
torch generates the kernel around the mask. A page holds keys and values of all heads side by side, which no stride can
present to ``flex_attention`` as one row of keys, and unused slots may hold NaN, which a weight of zero does not remove
from a value. So the step's pages are gathered, such values are neutralised, and the mask looks up the owner and the
position of each gathered key. This costs a copy of all keys that the step can attend to, in every layer.

Sizes come from host bounds, contents from the device's lengths. A graph would have to be captured for the longest
sequences and gather as much in every replay, so there is none: ``graph_support`` is "never".
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from slipstream.attention.backend import AttentionLayer, Caps
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.device.operation import TensorSpec, operation, spec_of
from slipstream.kernels.attention.paged_attention import PagedRequests

# (inputs, request, position of the query, position of the key) -> bool; the last three broadcast.
Visible = Callable[[tuple[Tensor, ...], Tensor, Tensor, Tensor], Tensor]

_FEW_QUERIES = 16  # the minimum rows of a matrix unit; decodes and verifications have fewer
_MANY_QUERIES = 64  # a prefill chunk is split into these; larger ones would make decodes in the batch slower
_MAX_KERNELS = 256  # limit on the kernels that torch compiles in a process
_NEVER = 1 << 30  # the first key of a token that attends to nothing

# torch's kernel cache, before any other code has changed its settings.
_INCLUDED = torch._C._dispatch_tls_local_include_set()
_EXCLUDED = torch._C._dispatch_tls_local_exclude_set()


# --- masks ------------------------------------------------------------------------------------------------------------


class MaskFunction(Protocol):
    """Which keys of its own request a token may attend to.

    Conditions that hold for every mask are not part of it: keys that do not exist (yet), those before ``seq_starts`` or
    outside the layer's window are never visible, and a token before ``seq_starts`` attends to nothing.
    """

    looks_ahead: ClassVar[bool]  # whether a token may attend to later keys; such tokens must be in one chunk
    sees_all_before: ClassVar[bool]  # whether it attends to all earlier keys; whole blocks of them then skip the mask

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Tensors that the function reads, on the device: a row for each request of the step, in its order."""
        ...

    @staticmethod
    def visible(inputs: tuple[Tensor, ...], request: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Pure, of torch operators. Called for existing tokens and keys; others are replaced by position 0."""
        ...


@dataclass(frozen=True, slots=True)
class Causal:
    """A token attends to itself and all tokens before it."""

    looks_ahead: ClassVar[bool] = False
    sees_all_before: ClassVar[bool] = True

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return ()

    @staticmethod
    def visible(inputs: tuple[Tensor, ...], request: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key <= query


@dataclass(frozen=True, slots=True, eq=False)
class PrefixLM:
    """The first tokens of a request attend to each other in both directions, those after them causally."""

    looks_ahead: ClassVar[bool] = True
    sees_all_before: ClassVar[bool] = True

    prefix_lens: Tensor  # [num_reqs] int32

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (self.prefix_lens,)

    @staticmethod
    def visible(inputs: tuple[Tensor, ...], request: Tensor, query: Tensor, key: Tensor) -> Tensor:
        prefix_len = inputs[0][request]
        return (key <= query) | ((query < prefix_len) & (key < prefix_len))


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """A token attends to the tokens before it in its own document."""

    looks_ahead: ClassVar[bool] = False
    sees_all_before: ClassVar[bool] = False

    document_ids: Tensor  # [num_reqs, at least the longest sequence] int32, one for each position

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (self.document_ids,)

    @staticmethod
    def visible(inputs: tuple[Tensor, ...], request: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (inputs[0][request, query] == inputs[0][request, key])


# --- the blocks of a step -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FlexShape:
    """How a step is split, from host numbers alone. A block of queries or keys belongs to one request."""

    query_block: int
    key_block: int  # a multiple of the page size
    num_query_blocks: int
    num_key_blocks: int
    max_key_blocks: int  # of one request

    @staticmethod
    def for_batch(common: CommonAttentionMetadata, key_block: int, window: int) -> FlexShape:
        num_tokens, bounds = np.diff(common.query_start_loc_cpu).astype(np.int64), common.seq_lens_cpu_upper_bound
        query_block = _FEW_QUERIES if common.max_query_len <= _FEW_QUERIES else _MANY_QUERIES
        key_blocks = -(-bounds.astype(np.int64) // key_block)
        if window:
            # From the first key that the first token attends to, to the last token's own, wherever blocks begin.
            key_blocks = np.minimum(key_blocks, (window + num_tokens + key_block - 3) // key_block + 1)
        return FlexShape(
            query_block=query_block,
            key_block=key_block,
            num_query_blocks=_rounded(int((-(-num_tokens // query_block)).sum())),
            num_key_blocks=_rounded(int(key_blocks.sum())),
            max_key_blocks=_rounded(int(key_blocks.max(initial=0))),
        )


def _rounded(count: int) -> int:
    """Rounded up to one of four sizes between powers of two, so that freed memory is reused more often.

    Never below two, because torch recompiles where an extent is one.
    """
    step = max(1, (1 << (count.bit_length() - 1)) // 4) if count else 1
    return max(2, -(-count // step) * step)


class FlexPlan(NamedTuple):
    """Where a step's tokens and keys go, and which blocks meet. The same for all layers with one window."""

    grid_indices: (
        Tensor  # [num_tokens] int64: index of each token in the blocks of queries; -1 if it attends to nothing
    )
    tokens: Tensor  # [num_query_blocks * query_block] int64: the token at each index; -1 for padding
    query_positions: Tensor  # [num_query_blocks, query_block] int32
    first_keys: Tensor  # [num_query_blocks, query_block] int32: the first visible position
    block_requests: Tensor  # [num_query_blocks] int32: the request of its tokens
    key_pages: Tensor  # [num_key_blocks * pages of a block] int64: the pages to gather
    key_requests: Tensor  # [num_key_blocks * key_block] int32: the request of each key; -1 where it is never visible
    key_positions: Tensor  # [num_key_blocks * key_block] int32
    kv_num_blocks: Tensor  # [num_query_blocks, 1, 1] int32: blocks of keys that need the mask
    kv_indices: Tensor  # [num_query_blocks, 1, 1, max_key_blocks] int32
    full_kv_num_blocks: Tensor  # likewise: blocks that are fully visible to every token of the block
    full_kv_indices: Tensor


def _plan_shape(num_tokens: int, page_size: int, shape: FlexShape) -> tuple[TensorSpec, ...]:
    rows, columns = shape.num_query_blocks, shape.num_key_blocks
    queries, keys = rows * shape.query_block, columns * shape.key_block
    grid, lists = (rows, shape.query_block), (rows, 1, 1, shape.max_key_blocks)
    long, short = torch.int64, torch.int32
    block_list = [TensorSpec(lists[:3], short), TensorSpec(lists, short)]
    return (
        TensorSpec((num_tokens,), long),
        TensorSpec((queries,), long),
        TensorSpec(grid, short),
        TensorSpec(grid, short),
        TensorSpec((rows,), short),
        TensorSpec((keys // page_size,), long),
        TensorSpec((keys,), short),
        TensorSpec((keys,), short),
        *block_list,
        *block_list,
    )


@operation(_plan_shape)
def flex_plan(
    requests: PagedRequests,
    num_tokens: int,
    page_size: int,
    shape: FlexShape,
    window: int,
    looks_ahead: bool,
    sees_all_before: bool,
) -> tuple[Tensor, ...]:  # as in FlexPlan
    """Blocks are assigned to requests in order, as many as the exact lengths need; those left over are padding."""
    query_start_loc, query_lens, seq_lens, block_table, seq_starts = requests
    size, device = shape.key_block, seq_lens.device
    lens = seq_lens.long()
    alive = torch.where(lens > 0, query_lens.long(), 0)
    starts = torch.zeros_like(lens) if seq_starts is None else seq_starts.long()
    # Keys: whole blocks of positions, from the block with the first key that any token of the request attends to.
    skipped = _back(lens - alive, starts, window) // size
    num_blocks = torch.where(alive > 0, (-(-lens // size) - skipped).clamp(min=0), 0)
    owner, idx, begin = _dealt(num_blocks, shape.num_key_blocks)
    idx = idx + skipped[owner.clamp(min=0)]
    keys = _keys(owner, idx, lens, starts, block_table, page_size, size)
    # Queries.
    rows, nth, _ = _dealt(-(-alive // shape.query_block), shape.num_query_blocks)
    own = rows.clamp(min=0)
    offsets = nth[:, None] * shape.query_block + torch.arange(shape.query_block, device=device)
    positions = (lens - alive)[own][:, None] + offsets
    first = starts[own][:, None]
    lives = (rows[:, None] >= 0) & (offsets < alive[own][:, None]) & (positions >= first)
    tokens = torch.where(lives, query_start_loc.long()[own][:, None] + offsets, -1).flatten()
    queries = (
        torch.where(lives, positions, 0).int(),
        torch.where(lives, _back(positions, first, window), _NEVER).int(),
        own.int(),
    )
    # One extra index collects the tokens that are in no block.
    grid_indices = torch.full((num_tokens + 1,), -1, dtype=torch.int64, device=device)
    grid_indices[torch.where(tokens < 0, num_tokens, tokens)] = torch.arange(tokens.shape[0], device=device)
    # Blocks of queries and keys that meet, by the first and last position in use of each block.
    low = torch.maximum(positions[:, 0], starts[own])
    high = torch.minimum(positions[:, -1] + 1, lens[own])
    meet = _meeting(low, high, starts[own], lens[own], size, window, looks_ahead, sees_all_before)
    lists = _lists(*meet, lives.any(1), (begin - skipped)[own], shape)
    return (grid_indices[:num_tokens], tokens, *queries, *keys, *lists)


def _back(positions: Tensor, starts: Tensor, window: int) -> Tensor:
    """The first visible key of a position."""
    return torch.maximum(starts, positions - (window - 1)) if window else starts.expand_as(positions)


def _dealt(counts: Tensor, num_blocks: int) -> tuple[Tensor, Tensor, Tensor]:
    """The owner of each block (-1: none) and its number among the owner's blocks; the first block of each owner."""
    ends = counts.cumsum(0)
    idx = torch.arange(num_blocks, device=counts.device)
    owner = torch.searchsorted(ends, idx, right=True)
    begin = ends - counts
    is_padding = owner >= counts.shape[0]
    return owner.masked_fill(is_padding, -1), idx - begin[owner.masked_fill(is_padding, 0)], begin


def _keys(
    owner: Tensor, idx: Tensor, lens: Tensor, starts: Tensor, block_table: Tensor, page_size: int, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Pages to gather, and the contents of each gathered slot: the inverse of the page table, for this step's pages."""
    own, device = owner.clamp(min=0)[:, None], owner.device
    pages = idx[:, None] * (size // page_size) + torch.arange(size // page_size, device=device)
    there = (owner[:, None] >= 0) & (pages * page_size < lens[own])
    # The null page, in place of what a table may hold after the last page.
    page_ids = torch.where(there, block_table.long()[own, pages.clamp(0, block_table.shape[1] - 1)], 0)
    positions = idx[:, None] * size + torch.arange(size, device=device)
    seen = (owner[:, None] >= 0) & (positions < lens[own]) & (positions >= starts[own])
    key_requests, key_positions = torch.where(seen, own, -1).int(), torch.where(seen, positions, 0).int()
    return page_ids.flatten(), key_requests.flatten(), key_positions.flatten()


def _meeting(
    low: Tensor,
    high: Tensor,
    starts: Tensor,
    lens: Tensor,
    size: int,
    window: int,
    looks_ahead: bool,
    sees_all_before: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The owner's blocks of keys that tokens at positions low to high - 1 need: from, to, fully visible from, to."""
    begin = _back(low, starts, window) // size
    end = -(-(lens if looks_ahead else high) // size)
    if not sees_all_before:
        return begin, end, begin, begin
    # Fully visible to all: within the window of the last token, and not after the first one.
    full_begin = torch.minimum(-(-_back(high - 1, starts, window) // size), end)
    return begin, end, full_begin, torch.maximum(full_begin, torch.minimum((low + 1) // size, end))


def _lists(
    begin: Tensor, end: Tensor, full_begin: Tensor, full_end: Tensor, lives: Tensor, first: Tensor, shape: FlexShape
) -> tuple[Tensor, ...]:
    """The blocks that meet, as indices of gathered blocks; ``first`` is where the owner's block 0 would be."""
    nth = torch.arange(shape.max_key_blocks, device=begin.device)
    num_full = torch.where(lives, full_end - full_begin, 0)
    num_asked = torch.where(lives, end - begin, 0) - num_full
    # Blocks that need the mask are on both sides of the fully visible ones.
    is_after = nth >= (full_begin - begin)[:, None]
    asked = (first + begin)[:, None] + nth + torch.where(is_after, num_full[:, None], 0)
    full = (first + full_begin)[:, None] + nth
    # A kernel may load one index more than it uses.
    asked, full = (ids.clamp(0, shape.num_key_blocks - 1).int()[:, None, None] for ids in (asked, full))
    return num_asked.int()[:, None, None], asked, num_full.int()[:, None, None], full


# --- attention --------------------------------------------------------------------------------------------------------


@operation(lambda q, kv_cache, plan, visible, inputs, shape, scale: spec_of(q))
def flex_paged_attention(
    q: Tensor,  # [num_tokens, num_heads, head_dim]
    kv_cache: Tensor,  # [num_pages, 2, num_kv_heads, page_size, head_dim]
    plan: tuple[Tensor, ...],  # as in FlexPlan
    visible: Visible,
    inputs: tuple[Tensor, ...],  # of the mask
    shape: FlexShape,
    scale: float,
) -> Tensor:  # [num_tokens, num_heads, head_dim]; zero for unused slots and for tokens that attend to nothing
    step = FlexPlan(*plan)
    num_heads, head_dim = q.shape[1:]
    lives = (step.tokens >= 0)[:, None, None]
    rows = torch.where(lives, q.index_select(0, step.tokens.clamp(min=0)), 0)
    queries = rows.view(-1, shape.query_block, num_heads, head_dim).transpose(1, 2)
    keys, values = _gather(kv_cache, step.key_pages, q.dtype)
    options: dict[str, Any] = {}
    if q.device.type == "cuda":
        # Tiles must divide the blocks. The kernel for short queries splits keys by its own rules; it is not tried here.
        tile = 64 if head_dim <= 128 else 32
        options = {"BACKEND": "TRITON", "BLOCK_M": shape.query_block, "BLOCK_N": min(tile, shape.key_block)}
    block_mask = _block_mask(step, visible, inputs, shape)
    # Head sizes, types, masks and the two block sizes of queries each compile a kernel; beyond the limit, which is
    # per thread, torch raises.
    if torch._dynamo.config.recompile_limit < _MAX_KERNELS:
        torch._dynamo.config.recompile_limit = _MAX_KERNELS
    attend = _compiled(q.device.type)
    out = attend(queries, keys, values, block_mask=block_mask, scale=scale, enable_gqa=True, kernel_options=options)
    grid = out.transpose(1, 2).reshape(-1, num_heads, head_dim)
    return torch.where((step.grid_indices >= 0)[:, None, None], grid.index_select(0, step.grid_indices.clamp(min=0)), 0)


def _gather(kv_cache: Tensor, page_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[1, num_kv_heads, keys, head_dim] each; a NaN or infinity in a value is moved into its key.

    A token for which a key is masked has weight zero for it, which times NaN would be NaN; the score is masked in any
    case. A token that attends to the key gets NaN as before.
    """
    _, _, num_kv_heads, _, head_dim = kv_cache.shape
    pages = kv_cache.index_select(0, page_ids).permute(1, 2, 0, 3, 4)
    keys, values = pages.reshape(2, 1, num_kv_heads, -1, head_dim).to(dtype)
    broken = ~torch.isfinite(values).all(-1, keepdim=True)
    return keys.masked_fill(broken, torch.nan), values.masked_fill(broken, 0.0)


def _block_mask(step: FlexPlan, visible: Visible, inputs: tuple[Tensor, ...], shape: FlexShape) -> BlockMask:
    """Every block of queries is an entry of the batch; all of them share the gathered keys."""
    _, _, positions, first_keys, requests, _, key_requests, key_positions = step[:8]

    def mask_mod(block: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        request, position = requests[block], key_positions[key]
        near = (key_requests[key] == request) & (position >= first_keys[block, query])
        return near & visible(inputs, request, positions[block, query], position)

    return BlockMask.from_kv_blocks(
        *step[8:],
        BLOCK_SIZE=(shape.query_block, shape.key_block),
        mask_mod=mask_mod,
        seq_lengths=(shape.query_block, key_requests.shape[0]),
        compute_q_blocks=False,
    )


@functools.cache
def _compiled(device_type: str) -> Callable[..., Tensor]:
    """One kernel for all sizes: the sizes of a step change often, and compiling takes seconds.

    Without a GPU the definition is traced and run uncompiled.
    """
    options: dict[str, Any] = {"dynamic": True, "fullgraph": True}
    if device_type == "cuda":
        made: Callable[..., Tensor] = torch.compile(flex_attention, **options)
        return made
    traced = torch.compile(flex_attention, **options, backend="eager")

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        # The simulated device runs queued work inside other calls, where torch disables parts of itself, among them
        # the transform that maps a mask over positions.
        with torch.no_grad(), torch._C._ForceDispatchKeyGuard(_INCLUDED, _EXCLUDED):
            out: Tensor = traced(*args, **kwargs)
            return out

    return attend


# --- the backend ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FlexMetadata:
    common: CommonAttentionMetadata
    mask: MaskFunction
    # By window, built by the first layer that has it.
    plans: dict[int, tuple[FlexShape, FlexPlan]] = field(default_factory=dict)


class FlexBackend:
    caps: ClassVar[Caps] = Caps(
        dtypes=("float64", "float32", "bfloat16", "float16"), host_lengths="bound", graph_support="never"
    )

    def __init__(self, page_size: int, mask: MaskFunction | None = None, key_block: int = 128) -> None:
        self._page_size = page_size
        self._mask: MaskFunction = Causal() if mask is None else mask
        self._key_block = max(page_size, key_block // page_size * page_size)

    def step_buffers(self) -> Sequence[Tensor]:
        return ()

    def build(self, common: CommonAttentionMetadata) -> FlexMetadata:
        assert common.is_causal, "drafting a block is not supported"
        return FlexMetadata(common, self._mask)

    def starting_at(self, metadata: FlexMetadata, seq_starts: Tensor) -> FlexMetadata:
        return FlexMetadata(replace(metadata.common, seq_starts=seq_starts), metadata.mask)

    def masked(self, metadata: FlexMetadata, mask: MaskFunction) -> FlexMetadata:
        """The same step with another mask: for a model whose layers differ, or whose steps bring their own."""
        return FlexMetadata(metadata.common, mask)

    def run(self, layer: AttentionLayer, q: Tensor, kv_cache: Tensor, metadata: FlexMetadata) -> Tensor:
        shape, plan = self._plan(metadata, layer.window, q.shape[0])
        mask = metadata.mask
        return flex_paged_attention(q, kv_cache, tuple(plan), mask.visible, mask.inputs, shape, layer.scale)

    def _plan(self, metadata: FlexMetadata, window: int, num_tokens: int) -> tuple[FlexShape, FlexPlan]:
        if window not in metadata.plans:
            common, mask = metadata.common, metadata.mask
            shape = FlexShape.for_batch(common, self._key_block, window)
            sizes = (num_tokens, self._page_size, shape, window)
            made = flex_plan(common.requests, *sizes, mask.looks_ahead, mask.sees_all_before)
            metadata.plans[window] = (shape, FlexPlan(*made))
        return metadata.plans[window]
