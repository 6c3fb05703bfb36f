"""Multi-head latent attention: a token's keys and values of all heads are one latent vector in its page.

Two ways lead to the same result. Requests with few query tokens, which is all that decode, attend to the latents
themselves: the matrices that would make keys and values of them are applied to queries and results instead
(absorbed). Longer prompts have keys and values made of latents, in chunks of a fixed size (un-absorbed).

Keys are cut at positions that depend on nothing else, and partial results are joined in their order. The table of
which program computes which part is made on the device in every step, by the first layer that needs it: a recording
of that layer contains the launch. Whether it is made is known to the step's own metadata and to nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.attention.backend import Caps
from slipstream.attention.context import StepTokens
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.attention.token_places import PassPlaces
from slipstream.cache_spec import CacheSpec, GroupedQuerySpec, Shape
from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.kernels.attention.latent_cache import NewLatents, gather_latents, store_latents
from slipstream.kernels.attention.latent_decode import LatentQueries, latent_decode
from slipstream.kernels.attention.latent_parts import PartTable, count_parts, schedule_parts
from slipstream.kernels.attention.latent_prompt import PromptKeys, PromptQueries, merge_attention, prompt_attention
from slipstream.kernels.attention.paged_attention import PagedRequests
from slipstream.kernels.linear.head_products import project_heads

# Up to this many query tokens a request attends to latents: what decodes, with any number of drafts.
MAX_ABSORBED = 17
# Keys that are made of latents at once, of one long request or of several short ones.
WORKSPACE_KEYS = 8192
_BACKENDS = ("triton", "cpu", "reference")


@dataclass(frozen=True)
class LatentSpec(CacheSpec):
    """The shape of such a layer: its sizes, and the latent that it keeps of a token."""

    num_heads: int
    latent_dim: int
    rope_dim: int  # of keys and queries alike, rotated; one key for all heads
    nope_dim: int  # of keys and queries, not rotated
    value_dim: int
    query_rank: int = 0  # of the product that makes queries; 0: one product
    interleaved: bool = True  # whether a rotation turns neighbouring entries, or those half a head apart

    exact_refusal: ClassVar[str] = (
        "the model's latent attention (MLA) computes prompts and decodes in two ways, which round differently"
    )

    def page_shapes(self, page_size: int) -> tuple[Shape, ...]:
        return (Shape((page_size, self.latent_dim + self.rope_dim)),)

    def working_values(self) -> int:
        """Queries before and after their product with latents, results likewise, and a prompt's keys and values."""
        made = self.nope_dim + self.rope_dim + 2 * self.value_dim
        return self.query_rank + self.num_heads * (2 * self.latent_dim + 2 * made)

    def open(self, setting: Any) -> LatentBackend:
        self.check(setting.config)
        pages = {idx: tensors[0] for idx, tensors in setting.memory.items()}
        return LatentBackend(self, pages, num_programs(setting))

    def check(self, config: EngineConfig) -> None:
        """Refuse options that such layers cannot be served with."""
        if config.attention_backend not in _BACKENDS:
            raise ConfigError(
                f"attention_backend {config.attention_backend} has no latent attention, which the model's layers need; "
                f"use {' or '.join(_BACKENDS)}"
            )
        if config.scheduler.least_saved is not None:
            raise ConfigError("cascade always needs keys of grouped-query attention, the model has latents; use auto")
        if config.cudagraph_mode == "full" and any(isinstance(s, GroupedQuerySpec) for s in config.model.cache_specs):
            raise ConfigError(
                "a draft model with latent attention beside a target without needs cudagraph_mode full_and_piecewise, "
                "full_decode_only or none"
            )


def num_programs(setting: Any) -> int:
    """As many as run at once; fewer where a kernel is its definition."""
    if setting.device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(setting.device).multi_processor_count)


class LatentLayer(NamedTuple):
    """The fixed properties of one layer of a model."""

    idx: int
    gain: Tensor  # [latent_dim], of the norm over latents
    eps: float
    to_keys: Tensor  # [num_heads, nope_dim, latent_dim]: absorbs queries
    to_values: Tensor  # [num_heads, latent_dim, value_dim]
    up: Callable[[Tensor], Tensor]  # both at once: [n, latent_dim] -> [n, num_heads * (nope_dim + value_dim)]
    scale: float


class LatentInputs(NamedTuple):
    """The output of a layer's projections for the tokens."""

    q: Tensor  # [num_tokens, num_heads, nope_dim + rope_dim], not rotated
    latents: Tensor  # [num_tokens, latent_dim + rope_dim], neither normed nor rotated
    cos_sin: Tensor  # [max_position, 2, rope_dim / 2]


class KeyChunk(NamedTuple):
    """Keys of neighbouring requests that are made at once; all of them, or a part of one request's."""

    first_key: int
    num_keys: int  # of each request, from the first on: an upper bound


@dataclass(slots=True)
class Run:
    """Neighbouring requests of a pass that attend in the same way. Sizes are bounds, tensors are on the device."""

    tokens: slice
    requests: PagedRequests  # whose tokens are counted from the run's first on
    max_query_len: int
    max_keys: int  # of one of them
    max_parts: int  # of the keys of all of them, if absorbed
    chunks: Sequence[KeyChunk] = ()  # of keys, for prompts; empty: absorbed


class PartTables:
    """Of each absorbed run, which program computes which parts: made once a step, by the first layer that needs it.

    An object belongs to one attention state, which a warm-up and a recording do not share. Passes of a drafter over
    the same tokens share it with the target's.
    """

    def __init__(self, num_programs: int) -> None:
        self._num_programs = num_programs
        self._made: dict[int, PartTable] = {}

    def of(self, idx: int, requests: PagedRequests) -> PartTable:
        """For the run with this number."""
        table = self._made.get(idx)
        if table is None:
            lens = requests.seq_lens
            starts = torch.empty(lens.shape[0] + 1, dtype=torch.int32, device=lens.device)
            begins = torch.empty(self._num_programs + 1, 2, dtype=torch.int32, device=lens.device)
            table = self._made[idx] = PartTable(starts, begins)
            schedule_parts(requests, MAX_ABSORBED, table)
        return table


@dataclass(frozen=True, slots=True)
class LatentMetadata:
    """One pass over a batch, from host bounds alone."""

    common: CommonAttentionMetadata
    tables: PartTables
    runs: Sequence[Run]

    @classmethod
    def build(cls, common: CommonAttentionMetadata, num_programs: int) -> LatentMetadata:
        assert common.is_causal, "latents are attended to causally"
        return cls(common, PartTables(num_programs), list(_find_runs(common)))

    def starting_at(self, seq_starts: Tensor) -> LatentMetadata:
        common = replace(self.common, seq_starts=seq_starts)
        return LatentMetadata(common, self.tables, list(_find_runs(common)))


def _find_runs(common: CommonAttentionMetadata) -> Iterator[Run]:
    starts, bounds = common.query_start_loc_cpu, common.seq_lens_cpu_upper_bound
    is_prompt = np.diff(starts) > MAX_ABSORBED
    if not is_prompt.any():
        # Padding included, since a recording serves every batch of its size.
        max_parts = sum(map(count_parts, bounds.tolist()))
        yield Run(slice(None), common.requests, common.max_query_len, common.max_seq_len, max_parts)
        return
    first = 0
    while first < common.num_reqs:
        end = first + 1
        while end < common.num_reqs and is_prompt[end] == is_prompt[first]:
            end += 1
        if is_prompt[first]:
            yield from _cut_prompts(common, first, end)
        else:
            yield _run(common, first, end)
        first = end


def _cut_prompts(common: CommonAttentionMetadata, first: int, end: int) -> Iterator[Run]:
    """Requests whose keys fit into the workspace together; a longer one alone, in chunks."""
    bounds = common.seq_lens_cpu_upper_bound.tolist()
    while first < end:
        last, longest = first + 1, bounds[first]
        while last < end and (last + 1 - first) * max(longest, bounds[last]) <= WORKSPACE_KEYS:
            longest, last = max(longest, bounds[last]), last + 1
        run = _run(common, first, last)
        run.chunks = [
            KeyChunk(begin, min(WORKSPACE_KEYS, longest - begin)) for begin in range(0, longest, WORKSPACE_KEYS)
        ]
        yield run
        first = last


def _run(common: CommonAttentionMetadata, first: int, end: int) -> Run:
    starts, own = common.query_start_loc_cpu, slice(first, end)
    begin = int(starts[first])
    query_start_loc = common.query_start_loc[first : end + 1]
    requests = PagedRequests(
        query_start_loc - begin if begin else query_start_loc,
        common.query_lens[own],
        common.seq_lens[own],
        common.block_table[own],
        None if common.seq_starts is None else common.seq_starts[own],
    )
    max_query_len = int(np.diff(starts[first : end + 1]).max())
    bounds = common.seq_lens_cpu_upper_bound[own].tolist()
    max_parts = sum(map(count_parts, bounds))
    return Run(slice(begin, int(starts[end])), requests, max_query_len, max(bounds), max_parts)


class LatentBackend:
    """The latents of a group of layers, and the operations on them."""

    caps: ClassVar[Caps] = Caps(
        dtypes=("float64", "float32", "bfloat16", "float16"), host_lengths="bound", graph_support="decode"
    )

    def __init__(self, spec: LatentSpec, pages: Mapping[int, Tensor], num_programs: int) -> None:
        self.spec, self.num_programs = spec, num_programs
        self.pages = pages  # by layer: [num_pages + 1, page_size, latent_dim + rope_dim]
        self._sizes = next(iter(pages.values())).shape[:2]

    def step_buffers(self) -> tuple[Tensor, ...]:
        return ()

    def begin(self, tokens: StepTokens, shared: LatentMetadata | None = None) -> LatentStep:
        if shared is None and tokens.common is not None:
            shared = LatentMetadata.build(tokens.common, self.num_programs)
        return LatentStep(self, shared, PassPlaces(tokens, *self._sizes))

    def can_share(self, other: Any) -> bool:
        return isinstance(other, LatentBackend) and other.num_programs == self.num_programs

    def adapt(self, shared: LatentMetadata, seq_starts: Tensor) -> LatentMetadata:
        return shared.starting_at(seq_starts)


@dataclass(slots=True)
class LatentStep:
    """One pass over the layers of a group."""

    backend: LatentBackend
    shared: LatentMetadata | None  # None for tokens whose latents are only stored
    places: PassPlaces
    is_recorded: bool = False

    def run(self, layer: LatentLayer, inputs: LatentInputs) -> Tensor:
        """[num_tokens, num_heads, value_dim]; zero for padding."""
        assert self.shared is not None, "tokens without a batch have nothing to attend to"
        q, spec = inputs.q, self.backend.spec
        nope, rope = q[..., : spec.nope_dim], self.store(layer, inputs)
        parts = [
            self._attend(layer, PromptQueries(nope[run.tokens], rope[run.tokens]), idx)
            for idx, run in enumerate(self.shared.runs)
        ]
        if len(parts) == 1 and parts[0].shape[0] == q.shape[0]:
            return parts[0]
        num_padding = q.shape[0] - sum(part.shape[0] for part in parts)
        padding = torch.zeros(num_padding, spec.num_heads, spec.value_dim, dtype=q.dtype, device=q.device)
        return torch.cat([*parts, padding])

    def store(self, layer: LatentLayer, inputs: LatentInputs) -> Tensor:
        """Write the tokens' latents; returns rotated queries, as many heads of them as there are."""
        places = self.places.of(inputs.cos_sin, inputs.latents.dtype)
        q_rope, norm = inputs.q[..., self.backend.spec.nope_dim :], (layer.gain, layer.eps)
        new = NewLatents(q_rope, inputs.latents, *norm, *places, self.backend.spec.interleaved)
        return store_latents(new, self.backend.pages[layer.idx])

    def _attend(self, layer: LatentLayer, q: PromptQueries, idx: int) -> Tensor:
        """Of the run with this number."""
        assert self.shared is not None
        pages, run = self.backend.pages[layer.idx], self.shared.runs[idx]
        return self._attend_prompts(layer, q, pages, run) if run.chunks else self._attend_absorbed(layer, q, pages, idx)

    def make_output(self, inputs: LatentInputs) -> Tensor:
        q, spec = inputs.q, self.backend.spec
        return torch.zeros(q.shape[0], spec.num_heads, spec.value_dim, dtype=q.dtype, device=q.device)

    def _attend_absorbed(self, layer: LatentLayer, q: PromptQueries, pages: Tensor, idx: int) -> Tensor:
        assert self.shared is not None
        run = self.shared.runs[idx]
        table = self.shared.tables.of(idx, run.requests)
        queries = LatentQueries(project_heads(q.nope, layer.to_keys), q.rope)
        mixed = latent_decode(queries, pages, run.requests, table, run.max_query_len, run.max_parts, layer.scale)
        return project_heads(mixed, layer.to_values)

    def _attend_prompts(self, layer: LatentLayer, q: PromptQueries, pages: Tensor, run: Run) -> Tensor:
        wide, found = len(run.chunks) > 1, None
        for chunk in run.chunks:
            latents, rope = gather_latents(pages, run.requests, *chunk, self.backend.spec.latent_dim)
            up = layer.up(latents).view(latents.shape[0], self.backend.spec.num_heads, -1)
            keys = PromptKeys(up, rope)
            part = prompt_attention(q, keys, run.requests, *chunk, run.max_query_len, layer.scale, wide)
            dtype = q.nope.dtype if chunk is run.chunks[-1] else part[0].dtype
            found = part if found is None else merge_attention(*found, *part, dtype)
        assert found is not None
        return found[0]
