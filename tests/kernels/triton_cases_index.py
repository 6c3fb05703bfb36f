"""Cases of a sparse indexer, for ``triton_cases``. What must not be read holds NaN: stale slots, padding queries."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.attention.index_cache import store_index_keys
from slipstream.kernels.attention.index_scores import index_scores
from slipstream.kernels.attention.index_topk import choose_positions, top_positions
from slipstream.kernels.attention.paged_attention import PagedRequests
from slipstream.kernels.attention.sparse_latent import sparse_latent_attention
from slipstream.kernels.attention.token_keys import find_token_keys
from tests.kernels.triton_cases_latent import DEEPSEEK, SMALL, Batch, Sizes, draw_cache, hide, ints
from tests.kernels.triton_check import Case, Real


class IndexSizes(NamedTuple):
    heads: int = 3
    dim: int = 12
    rope: int = 8
    page_size: int = 4


TINY = IndexSizes()
REAL = IndexSizes(64, 128, 64, 16)
BATCHES = {
    "one": Batch([1], [1]),
    "steps": Batch([1, 1, 1, 1], [129, 128, 0, 7], padding=2, padded_slots=1),
    "drafts": Batch([4, 2, 3, 0], [4, 130, 70, 0], unused=(0, 2, 1, 4), padding=1, padded_slots=4),
    "mixed": Batch([1, 20, 4, 2, 0], [300, 60, 4, 33, 0], padding=2, spare=5),
    "starts": Batch([1, 2, 4, 1, 1], [140, 2, 300, 90, 60], padding=1, seq_starts=(129, 1, 37, 90, 0)),
}


def token_args(batch: Batch) -> dict[str, Any]:
    return {**batch.requests(4), "num_tokens": batch.num_tokens}


def keys_of_tokens(requests: dict[str, Tensor | None], num_tokens: int) -> dict[str, Tensor]:
    """By the definition of the operation, which has tests of its own."""
    found = find_token_keys.body(PagedRequests(**requests), num_tokens)
    return dict(zip(("requests", "firsts", "ends"), found, strict=True))


def store_args(num_tokens: int, sizes: IndexSizes, interleaved: bool = False) -> dict[str, Any]:
    half, slots = sizes.rope // 2, torch.randperm(64)[:num_tokens]
    joint = torch.randn(num_tokens, 5 + sizes.dim)
    return {
        "q": Real(torch.randn(num_tokens, sizes.heads, sizes.dim + 3)[..., 3:]),
        "k": Real(1.5 + 3 * joint[:, 5:]),
        "weight": Real(torch.randn(sizes.dim)),
        "bias": Real(torch.randn(sizes.dim)),
        "eps": 1e-6,
        "cos": torch.randn(num_tokens, 1, half).repeat(1, 1, 2),
        "sin": torch.randn(num_tokens, 1, half).repeat(1, 1, 2) * ints([-1, 1]).repeat_interleave(half),
        "keys": Real(torch.randn(64 // sizes.page_size, sizes.page_size, sizes.dim)),
        "page_ids": slots // sizes.page_size,
        "offsets": slots % sizes.page_size,
        "interleaved": interleaved,
    }


def score_args(batch: Batch, sizes: IndexSizes, spare_keys: int = 0, whole: bool = False) -> dict[str, Any]:
    """With whole numbers, scores are exact in every type, and many are equal."""
    requests = batch.requests(sizes.page_size)
    keys = draw_cache(requests, Sizes(latent=sizes.dim, rope=0, page_size=sizes.page_size))
    q = torch.randn(batch.num_tokens, sizes.heads, sizes.dim + 3)
    weights = torch.randn(batch.num_tokens, sizes.heads)
    if whole:
        keys, q, weights = keys.round(), (2 * q).round(), (2 * weights).round()
    return {
        "q": Real(hide(q, batch)[..., 3:]),
        "weights": weights,
        "keys": Real(keys),
        "block_table": requests["block_table"],
        **keys_of_tokens(requests, batch.num_tokens),
        "max_keys": max(batch.seq_lens) + spare_keys,
        "scale": 0.25 if whole else sizes.dim**-0.5,
    }


def choose_args(batch: Batch, sizes: IndexSizes, k: int, spare_keys: int = 0) -> dict[str, Any]:
    return score_args(batch, sizes, spare_keys, whole=True) | {"k": k}


def top_args(num_rows: int, max_keys: int, k: int, levels: float = 0.0, seen: float = 1.0) -> dict[str, Any]:
    """Of so many levels on either side of zero, or all different; some are not seen."""
    scores = torch.randn(num_rows, max_keys)
    if levels:
        scores = (levels * scores).round() / levels
    return {"scores": scores.masked_fill_(torch.rand(num_rows, max_keys) > seen, -torch.inf), "k": k}


def special_rows() -> Tensor:
    """Rows of numbers that are easily put into the wrong order."""
    inf, tiny, largest = torch.inf, 1e-45, torch.finfo(torch.float32).max
    rows = [
        [0.0, -0.0, 0.0, -0.0, 0.0, -0.0, 0.0, -0.0, -tiny, tiny],
        [-0.0, -0.0, -inf, -inf, 0.0, 0.0, -inf, -0.0, -0.0, 0.0],
        [-inf] * 10,
        [-inf] * 9 + [-largest],
        [inf, -inf, largest, -largest, inf, 1.0, -1.0, tiny, -tiny, 0.0],
        [-1.0] * 10,
        [-3.0, -2.0, -1.0, -2.0, -3.0, -2.0, -1.0, -2.0, -3.0, -2.0],
    ]
    return torch.tensor(rows)


def draw_positions(ends: Tensor, firsts: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Ascending ones of those that each token sees; all, if there are no more."""
    positions, counts = torch.full((len(ends), k), -1, dtype=torch.int32), torch.zeros(len(ends), dtype=torch.int32)
    for i, (first, end) in enumerate(zip(firsts.tolist(), ends.tolist(), strict=True)):
        own = first + torch.randperm(end - first)[:k].sort().values
        positions[i, : len(own)], counts[i] = own.int(), len(own)
    return positions, counts


def sparse_args(batch: Batch, sizes: Sizes, k: int, part_size: int) -> dict[str, Any]:
    requests = batch.requests(sizes.page_size)
    own = keys_of_tokens(requests, batch.num_tokens)
    positions, counts = draw_positions(own["ends"], own["firsts"], k)
    q = hide(torch.randn(batch.num_tokens, sizes.heads, sizes.latent + sizes.rope + 3), batch)
    return {
        "latent": Real(q[..., : sizes.latent]),
        "rope": Real(q[..., sizes.latent : sizes.latent + sizes.rope]),
        "cache": Real(draw_cache(requests, sizes)),
        "block_table": requests["block_table"],
        **own,
        "positions": positions,
        "counts": counts,
        "part_size": part_size,
        "scale": 0.2,
    }


SPARSE = {
    "one": (BATCHES["one"], SMALL, 8, 8),
    "steps": (BATCHES["steps"], SMALL, 8, 3),
    "drafts": (BATCHES["drafts"], SMALL._replace(page_size=1, heads=5), 40, 16),
    "starts": (BATCHES["starts"], SMALL._replace(page_size=16), 100, 32),
    "mixed": (BATCHES["mixed"], SMALL._replace(heads=16), 8, 8),
}


def of_deepseek_indexer() -> Iterator[Case]:
    """Of real sizes: few tokens, so that the interpreter can be asked as well."""
    batch = Batch([1], [40])
    yield Case("store_index_keys-deepseek", store_index_keys, partial(store_args, 1, REAL))
    yield Case("index_scores-deepseek", index_scores, partial(score_args, batch, REAL))
    # As recorded for a context of any length.
    chosen = partial(choose_args, Batch([1], [2100]), REAL, 2048, (1 << 17) - 2100)
    yield Case("choose_positions-deepseek", choose_positions, chosen)
    yield Case("top_positions-deepseek", top_positions, partial(top_args, 1, 1 << 17, 2048, 1000.0))
    many_heads = DEEPSEEK._replace(heads=128)
    for name, part_size in (("parts", 512), ("whole", 2048)):
        args = partial(sparse_args, batch, many_heads, 2048, part_size)
        yield Case(f"sparse_latent_attention-deepseek-{name}", sparse_latent_attention, args)


def indexers() -> Iterator[Case]:
    yield from of_deepseek_indexer()
    for name, num_tokens, sizes, interleaved in (
        ("odd", 5, TINY, False),
        ("pairs", 3, TINY._replace(page_size=1), True),
        ("stores-only", 3, TINY._replace(heads=0, page_size=8), False),
        ("whole-turns", 2, TINY._replace(rope=12, heads=17), False),
    ):
        yield Case(f"store_index_keys-{name}", store_index_keys, partial(store_args, num_tokens, sizes, interleaved))
    for name, batch in BATCHES.items():
        yield Case(f"find_token_keys-{name}", find_token_keys, partial(token_args, batch))
        yield Case(f"index_scores-{name}", index_scores, partial(score_args, batch, TINY, 17))
        yield Case(f"choose_positions-{name}", choose_positions, partial(choose_args, batch, TINY, 8, 17))
    yield Case("find_token_keys-many", find_token_keys, partial(token_args, Batch([1] * 300, [9] * 300, spare=3)))
    for shape in ((1, 1, 8), (3, 7, 8), (3, 300, 8, 2.0), (2, 5000, 300, 9.0, 0.7), (2, 2500, 2048, 0.0, 0.5)):
        yield Case(f"top_positions-{'x'.join(map(str, shape))}", top_positions, partial(top_args, *shape))
    for k in (4, 12):
        yield Case(f"top_positions-special-{k}", top_positions, lambda k=k: {"scores": special_rows(), "k": k})
    for name, shape in SPARSE.items():
        yield Case(f"sparse_latent_attention-{name}", sparse_latent_attention, partial(sparse_args, *shape))
