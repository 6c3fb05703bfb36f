"""Latents for the hash model: the real builder, tables and runs of latent attention, with a hash in place of kernels.

An entry holds what a key of the hash model holds. What a token has seen is a sum over its keys, so parts and chunks of
keys may be added up in any order, and one that is left out, comes twice or is another request's changes the token.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from slipstream.attention.backend import AttentionLayer
from slipstream.attention.context import StepTokens
from slipstream.attention.grouped_query import NewHeads
from slipstream.attention.mla import LatentBackend, LatentMetadata, LatentSpec, LatentStep
from slipstream.attention.sparse_mla import SparseLatentBackend, SparseLatentSpec, SparseLatentStep
from slipstream.device.operation import TensorSpec, operation
from slipstream.kernels.attention.index_scores import IndexQueries
from slipstream.kernels.attention.index_topk import ChosenKeys
from slipstream.kernels.attention.latent_parts import PartTable, count_parts, first_of_part
from slipstream.kernels.attention.paged_attention import PagedRequests
from slipstream.kernels.attention.token_keys import TokenKeys
from tests.sim.hash_model import HEAD_LAYER, HEAD_SCALE, MODEL_CONFIG
from tests.sim.hashes import halves, read_whole, scramble

QUERY_DIVISOR, KEY_DIVISOR = 7, 1000  # which digits of a hash an indexer compares
_WIDTH = 5  # of what is added up: the keys' hash in halves, two numbers of the first key, how many keys were seen


@operation(writes=("pages",))
def hash_store(
    entries: Tensor,  # [num_tokens, 4] float64
    pages: Tensor,  # [num_pages + 1, page_size, 4]
    page_ids: Tensor,  # [num_tokens] int64
    offsets: Tensor,  # [num_tokens] int64
) -> None:
    pages[page_ids, offsets] = entries


@operation(lambda entries: TensorSpec((entries.shape[0], _WIDTH), entries.dtype))
def hash_parts(
    entries: Tensor,  # [num_tokens, 4] float64
    pages: Tensor,  # [num_pages + 1, page_size, 4]
    requests: PagedRequests,
    table: PartTable,
    max_query_len: int,  # the host's bounds, by which kernels size grids and memory
    max_parts: int,
    layer_idx: int,
) -> Tensor:
    out, lens = np.zeros((len(entries), _WIDTH)), requests.seq_lens.tolist()
    begins, part_starts, done = table.begins.tolist(), table.part_starts.tolist(), set[tuple[int, int]]()
    counts = [
        count_parts(length) * bool(alive) for length, alive in zip(lens, requests.query_lens.tolist(), strict=True)
    ]
    if sum(counts) > max_parts:
        raise ValueError(f"{sum(counts)} parts, a bound of {max_parts}")
    if np.diff(part_starts)[: len(lens)].tolist() != counts:
        raise ValueError("a table of other lengths")
    if max(requests.query_lens.tolist(), default=0) > max_query_len:
        raise ValueError(f"{max(requests.query_lens.tolist())} queries, a bound of {max_query_len}")
    for begin, end in itertools.pairwise(begins):
        for request, part in _between(tuple(begin), tuple(end), counts):
            if (request, part) in done:
                raise ValueError("a part is computed twice")
            done.add((request, part))
            first, last = first_of_part(part), min(first_of_part(part + 1), lens[request])
            _add_keys(out, entries, pages, requests, request, range(first, last), layer_idx)
    return torch.from_numpy(out)


def _between(begin: tuple[int, ...], end: tuple[int, ...], counts: list[int]) -> Iterator[tuple[int, int]]:
    request, part = begin
    while (request, part) < end:
        if request >= len(counts) or part >= counts[request]:
            request, part = request + 1, 0
            if request > len(counts):
                return
            continue
        yield request, part
        part += 1


@operation(lambda entries: TensorSpec((entries.shape[0], _WIDTH), entries.dtype))
def hash_chunk(
    entries: Tensor,  # [num_tokens, 4] float64
    pages: Tensor,  # [num_pages + 1, page_size, 4]
    requests: PagedRequests,
    first_key: int,
    num_keys: int,
    max_query_len: int,
    layer_idx: int,
) -> Tensor:
    out = np.zeros((len(entries), _WIDTH))
    if max(requests.query_lens.tolist(), default=0) > max_query_len:
        raise ValueError(f"{max(requests.query_lens.tolist())} queries, a bound of {max_query_len}")
    for request, length in enumerate(requests.seq_lens.tolist()):
        keys = range(first_key, min(first_key + num_keys, length))
        _add_keys(out, entries, pages, requests, request, keys, layer_idx)
    return torch.from_numpy(out)


def _add_keys(
    out: np.ndarray, entries: Tensor, pages: Tensor, requests: PagedRequests, request: int, keys: range, layer_idx: int
) -> None:
    """Add these keys to what each token of a request has seen that sees them."""
    starts, alive, lens, table, first_slots = requests
    begin, count, length = int(starts[request]), int(alive[request]), int(lens[request])
    first_slot, page_size = 0 if first_slots is None else int(first_slots[request]), pages.shape[1]
    if not 0 <= count <= int(starts[request + 1]) - begin or count > length > table.shape[1] * page_size:
        raise ValueError(f"{count} living tokens of {int(starts[request + 1]) - begin}, {length} keys")
    own = np.array([key for key in keys if key >= first_slot], dtype=np.int64)
    if not count or not len(own):
        return
    page_ids = table[request].numpy()[own // page_size]
    if (page_ids <= 0).any():
        raise IndexError("reads the null page, or none at all")
    values = read_whole(pages.numpy()[page_ids, own % page_size])
    index = own.astype(np.uint64) + np.uint64(layer_idx == HEAD_LAYER)
    sums = np.cumsum(scramble(values[:, 0] * np.uint64(8191) + values[:, 1] * np.uint64(127) + index))
    for token in range(begin, begin + count):
        num_seen = int(np.searchsorted(own, length - count + token - begin, side="right"))
        if num_seen:
            out[token, :2] = halves(_whole_sum(out[token]) + sums[num_seen - 1 : num_seen])[0]
            out[token, 4] += num_seen
            if own[0] == first_slot:
                out[token, 2:4] = values[0, 2:]


def _whole_sum(row: np.ndarray) -> np.ndarray:
    """[1] uint64: sums are modulo 2**64, of which numpy warns for single numbers."""
    return np.array([int(row[0]) | int(row[1]) << 32], dtype=np.uint64)


@operation(like="first")
def add_seen(first: Tensor, second: Tensor) -> Tensor:
    """What two chunks of keys add up to."""
    out = (first + second).numpy()
    for row, a, b in zip(out, first.numpy(), second.numpy(), strict=True):
        row[:2] = halves(_whole_sum(a) + _whole_sum(b))[0]
    return torch.from_numpy(out)


@operation(like="entries")
def hash_seen(entries: Tensor, seen: Tensor, layer_idx: int) -> Tensor:
    """As ``hash_attention``: hash of what each token has seen and of itself, position, sum of the keys' hashes."""
    out = np.zeros(entries.shape)
    for row, entry, sums in zip(out, entries.numpy(), seen.numpy(), strict=True):
        if sums[4]:
            own = read_whole(entry[None])[0]
            total = _whole_sum(sums)
            mixed = total + scramble(own[:1] + own[1:2] * np.uint64(3) + np.uint64(layer_idx))
            row[0], row[1] = float(scramble(mixed)[0] >> np.uint64(16)), entry[1]
            row[2:] = halves(total)[0]
            if layer_idx == HEAD_LAYER:
                row[:2] = sums[2:4]
    return torch.from_numpy(out)


class HashLatentStep(LatentStep):
    """The course of ``LatentStep``, for the inputs that other layers of the hash model have too."""

    def run(self, layer: AttentionLayer, inputs: NewHeads) -> Tensor:  # type: ignore[override]
        entries, pages = inputs.q.flatten(1), self.backend.pages[layer.idx]
        self.store(layer, inputs.k, inputs.v, inputs.cos_sin)
        assert self.shared is not None
        runs = enumerate(self.shared.runs)
        return self.join(entries, [self.attend(layer, entries[run.tokens], pages, idx) for idx, run in runs])

    def attend(self, layer: AttentionLayer, own: Tensor, pages: Tensor, idx: int) -> Tensor:
        """Of the run with this number, all keys of each request."""
        assert self.shared is not None
        run, seen = self.shared.runs[idx], None
        layer_idx = HEAD_LAYER if layer.scale == HEAD_SCALE else layer.idx
        for chunk in run.chunks:
            part = hash_chunk(own, pages, run.requests, *chunk, run.max_query_len, layer_idx)
            seen = part if seen is None else add_seen(seen, part)
        if seen is None:
            table = self.shared.tables.of(idx, run.requests)
            seen = hash_parts(own, pages, run.requests, table, run.max_query_len, run.max_parts, layer_idx)
        return hash_seen(own, seen, layer_idx)

    @staticmethod
    def join(entries: Tensor, found: list[Tensor]) -> Tensor:
        num_padding = entries.shape[0] - sum(part.shape[0] for part in found)
        padding = torch.zeros(num_padding, 4, dtype=entries.dtype, device=entries.device)
        return torch.cat([*found, padding]).unsqueeze(1)

    def store(  # type: ignore[override]
        self, layer: AttentionLayer, k: Tensor, v: Tensor, cos_sin: Tensor, norms: None = None
    ) -> None:
        places = self.places.of(cos_sin, k.dtype)
        hash_store(k.flatten(1), self.backend.pages[layer.idx], places.page_ids, places.offsets)

    def make_output(self, inputs: NewHeads) -> Tensor:  # type: ignore[override]
        return torch.zeros(inputs.q.shape, dtype=inputs.q.dtype, device=inputs.q.device)


class HashLatentBackend(LatentBackend):
    def begin(self, tokens: StepTokens, shared: LatentMetadata | None = None) -> HashLatentStep:
        real = super().begin(tokens, shared)
        return HashLatentStep(real.backend, real.shared, real.places)


class HashSpec(LatentSpec):
    def open(self, setting: Any) -> HashLatentBackend:
        real = super().open(setting)
        return HashLatentBackend(real.spec, real.pages, real.num_programs)


SPEC = HashSpec(num_heads=1, latent_dim=2, rope_dim=2, nope_dim=1, value_dim=1)
LATENT_CONFIG = replace(MODEL_CONFIG, layer_caches=(SPEC,) * MODEL_CONFIG.num_layers)


# --- with an indexer --------------------------------------------------------------------------------


@operation(lambda entries, divisor: TensorSpec((entries.shape[0], 1, 2), entries.dtype))
def hash_digits(entries: Tensor, divisor: int) -> Tensor:
    """Two digits of each token's hash: whole numbers, so that scores are exact and often equal."""
    values = np.nan_to_num(entries[:, 0].numpy(), nan=0.0).astype(np.uint64) // np.uint64(divisor)
    return torch.from_numpy(np.stack([values % np.uint64(8), values // np.uint64(8) % np.uint64(8)], 1)[:, None] * 1.0)


@operation(lambda entries: TensorSpec((entries.shape[0], _WIDTH), entries.dtype))
def hash_chosen(
    entries: Tensor,  # [num_tokens, 4] float64
    pages: Tensor,  # [num_pages + 1, page_size, 4]
    block_table: Tensor,  # [num_reqs, max_pages] int32
    token_keys: TokenKeys,
    chosen: ChosenKeys,
    layer_idx: int,
) -> Tensor:
    out, one = np.zeros((len(entries), _WIDTH)), torch.ones(1, dtype=torch.int32)
    rows = zip(*(x.tolist() for x in (*token_keys, chosen.counts)), strict=True)
    for token, (request, first, end, count) in enumerate(rows):
        own = chosen.positions[token, :count].tolist()
        if own != sorted(set(own)) or not all(first <= position < end for position in own):
            raise ValueError(f"positions {own} of keys {first} to {end}")
        table = block_table[request : request + 1]
        alone = PagedRequests(torch.tensor([0, 1], dtype=torch.int32), one, one * end, table, None)
        for position in own:
            _add_keys(out[token : token + 1], entries, pages, alone, 0, range(position, position + 1), layer_idx)
    return torch.from_numpy(out)


class HashSparseStep(HashLatentStep):
    """The course of ``SparseLatentStep``: scores and choices are the engine's own, of digits of hashes."""

    real: SparseLatentStep | None = None

    def run(self, layer: AttentionLayer, inputs: NewHeads) -> Tensor:  # type: ignore[override]
        entries, pages = inputs.q.flatten(1), self.backend.pages[layer.idx]
        backend = cast(HashSparseBackend, self.backend)
        self.store(layer, inputs.k, inputs.v, inputs.cos_sin)
        assert self.shared is not None
        queries = hash_digits(entries, QUERY_DIVISOR)
        weights = torch.ones(entries.shape[0], 1, dtype=entries.dtype, device=entries.device)
        if self.real is None:  # one for all layers: what the first has found serves the rest
            self.real = SparseLatentStep(backend, self.shared, self.places)
        self.real.queries = IndexQueries(queries, weights)
        found = []
        for idx, run in enumerate(self.shared.runs):
            own = entries[run.tokens]
            if run.max_keys <= backend.spec.top_k:
                found.append(self.attend(layer, own, pages, idx))
                continue
            for tokens, token_keys, chosen in self.real.choose(layer.idx, idx):
                seen = hash_chosen(own[tokens], pages, run.requests.block_table, token_keys, chosen, layer.idx)
                found.append(hash_seen(own[tokens], seen, layer.idx))
        return self.join(entries, found)

    def store(  # type: ignore[override]
        self, layer: AttentionLayer, k: Tensor, v: Tensor, cos_sin: Tensor, norms: None = None
    ) -> None:
        HashLatentStep.store(self, layer, k, v, cos_sin)
        places, backend = self.places.of(cos_sin, k.dtype), cast(HashSparseBackend, self.backend)
        digits = hash_digits(k.flatten(1), KEY_DIVISOR).flatten(1)
        hash_store(digits, backend.index_pages[layer.idx], places.page_ids, places.offsets)


class HashSparseBackend(SparseLatentBackend):
    def begin(self, tokens: StepTokens, shared: LatentMetadata | None = None) -> HashSparseStep:  # type: ignore[override]
        real = super().begin(tokens, shared)
        return HashSparseStep(real.backend, real.shared, real.places)


class HashSparseSpec(SparseLatentSpec):
    def open(self, setting: Any) -> HashSparseBackend:
        real = super().open(setting)
        return HashSparseBackend(self, setting.memory, real.num_programs)


TOP_K = 5
SPARSE_SPEC = HashSparseSpec(**asdict(SPEC), index_heads=1, index_dim=2, top_k=TOP_K)
SPARSE_CONFIG = replace(MODEL_CONFIG, layer_caches=(SPARSE_SPEC,) * MODEL_CONFIG.num_layers)
