"""Latent attention over the keys that an indexer chooses: a few thousand of a long context for each token.

A layer keeps one key more of each token, the indexer's, in the same pages as its latent. Small heads score every key
that a token sees, and the token attends to those with the highest scores alone, the lowest position first where scores
are equal. A sequence that is not longer than their number is attended to as a whole: scores decide nothing there, but
the indexer's keys are written all the same.

Sizes come from host bounds, lengths from the device. A bound that is too high makes rows of scores longer, no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from slipstream.attention.context import StepTokens
from slipstream.attention.mla import LatentBackend, LatentMetadata, LatentSpec, LatentStep, num_programs
from slipstream.cache_spec import Shape
from slipstream.kernels.attention.index_cache import NewIndexKeys, store_index_keys
from slipstream.kernels.attention.index_scores import IndexQueries
from slipstream.kernels.attention.index_topk import ChosenKeys, choose_positions
from slipstream.kernels.attention.latent_decode import LatentQueries
from slipstream.kernels.attention.latent_prompt import PromptQueries
from slipstream.kernels.attention.sparse_latent import sparse_latent_attention
from slipstream.kernels.attention.token_keys import TokenKeys, find_token_keys
from slipstream.kernels.linear.head_products import project_heads

# Scores that are kept at once, of some query tokens with all keys.
WORKSPACE_SCORES = 1 << 26
# Chosen keys that one program goes over where requests decode; of a prompt it goes over all of a token's.
PART_SIZE = 512


@dataclass(frozen=True)
class SparseLatentSpec(LatentSpec):
    """Latents, and the keys of an indexer beside them."""

    index_heads: int = 64
    index_dim: int = 128
    top_k: int = 2048  # keys that a token attends to

    def page_shapes(self, page_size: int) -> tuple[Shape, ...]:
        return (*super().page_shapes(page_size), Shape((page_size, self.index_dim)))

    def working_values(self) -> int:
        """Queries of the indexer too, and the positions it chooses."""
        return super().working_values() + 2 * self.index_heads * self.index_dim + 2 * self.top_k

    def open(self, setting: Any) -> SparseLatentBackend:
        self.check(setting.config)
        return SparseLatentBackend(self, setting.memory, num_programs(setting))


class SparseLatentLayer(NamedTuple):
    """The fields of ``LatentLayer``, and the norm of the indexer's keys."""

    idx: int
    gain: Tensor
    eps: float
    to_keys: Tensor
    to_values: Tensor
    up: Callable[[Tensor], Tensor]
    scale: float
    key_gain: Tensor  # [index_dim]
    key_bias: Tensor  # [index_dim]


class SparseLatentInputs(NamedTuple):
    """The fields of ``LatentInputs``, and the indexer's projections of the tokens."""

    q: Tensor
    latents: Tensor
    cos_sin: Tensor
    index_q: Tensor  # [num_tokens, index_heads, index_dim], not rotated; without heads: to store only
    index_k: Tensor  # [num_tokens, index_dim], neither normed nor rotated
    index_weights: Tensor  # [num_tokens, index_heads] float32 at least: of the heads' scores


class SparseLatentBackend(LatentBackend):
    spec: SparseLatentSpec

    def __init__(self, spec: SparseLatentSpec, memory: Mapping[int, tuple[Tensor, ...]], programs: int) -> None:
        super().__init__(spec, {idx: tensors[0] for idx, tensors in memory.items()}, programs)
        self.index_pages = {idx: tensors[1] for idx, tensors in memory.items()}  # [num_pages + 1, page_size, index_dim]

    def begin(self, tokens: StepTokens, shared: LatentMetadata | None = None) -> SparseLatentStep:
        step = super().begin(tokens, shared)
        return SparseLatentStep(step.backend, step.shared, step.places)


@dataclass(slots=True)
class SparseLatentStep(LatentStep):
    queries: IndexQueries | None = None  # of the layer that runs
    # The keys that each token of a run sees: found by the first layer that needs them, the same for all.
    _seen: dict[int, TokenKeys] = field(default_factory=dict)

    def store(self, layer: Any, inputs: Any) -> Tensor:
        """Write latents and the indexer's keys; keeps the indexer's rotated queries for attending."""
        backend = cast(SparseLatentBackend, self.backend)
        places = self.places.of(inputs.cos_sin, inputs.latents.dtype)
        norm = (layer.key_gain, layer.key_bias, _INDEX_EPS)
        new = NewIndexKeys(inputs.index_q, inputs.index_k, *norm, *places)
        self.queries = IndexQueries(store_index_keys(new, backend.index_pages[layer.idx]), inputs.index_weights)
        # Not by ``super()``, which names the class as it was before the decorator gave it slots.
        return LatentStep.store(self, layer, inputs)

    def _attend(self, layer: Any, q: PromptQueries, idx: int) -> Tensor:
        assert self.shared is not None
        backend, run = cast(SparseLatentBackend, self.backend), self.shared.runs[idx]
        if run.max_keys <= backend.spec.top_k:
            return LatentStep._attend(self, layer, q, idx)
        queries, pages = LatentQueries(project_heads(q.nope, layer.to_keys), q.rope), backend.pages[layer.idx]
        part_size = backend.spec.top_k if run.chunks else PART_SIZE
        found = []
        for tokens, token_keys, chosen in self.choose(layer.idx, idx):
            own, table = LatentQueries(*(part[tokens] for part in queries)), run.requests.block_table
            found.append(sparse_latent_attention(own, pages, table, token_keys, chosen, part_size, layer.scale))
        return project_heads(found[0] if len(found) == 1 else torch.cat(found), layer.to_values)

    def choose(self, layer_idx: int, idx: int) -> Iterator[tuple[slice, TokenKeys, ChosenKeys]]:
        """The positions that tokens of a run attend to, some tokens after others: their scores fit the workspace."""
        assert self.shared is not None and self.queries is not None
        backend, run = cast(SparseLatentBackend, self.backend), self.shared.runs[idx]
        spec, pages = backend.spec, backend.index_pages[layer_idx]
        q, weights = (part[run.tokens] for part in self.queries)
        seen = self._seen.get(idx)
        if seen is None:
            seen = self._seen[idx] = TokenKeys(*find_token_keys(run.requests, q.shape[0]))
        at_once = max(1, WORKSPACE_SCORES // run.max_keys)
        for first in range(0, q.shape[0], at_once):
            tokens = slice(first, min(first + at_once, q.shape[0]))
            own, queries = seen.of(tokens), IndexQueries(q[tokens], weights[tokens])
            sizes = (run.max_keys, spec.index_dim**-0.5, spec.top_k)
            chosen = choose_positions(queries, pages, run.requests.block_table, own, *sizes)
            yield tokens, own, ChosenKeys(*chosen)


_INDEX_EPS = 1e-6  # of the norm over the indexer's keys, whatever the config says of the others
