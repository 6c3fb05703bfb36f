"""What latent attention must give, in float64 and token by token: what is not seen is never read."""

from __future__ import annotations

import torch
from torch import Tensor


def entries_of(cache: Tensor, requests: dict[str, Tensor | None], request: int) -> Tensor:
    """All slots of a request in order, float64."""
    table, lens = requests["block_table"], requests["seq_lens"]
    assert table is not None and lens is not None
    slot = torch.arange(int(lens[request]))
    return cache[table[request, slot // cache.shape[1]].long(), slot % cache.shape[1]].double()


def seen_by_tokens(requests: dict[str, Tensor | None]) -> list[tuple[int, int, int, int]]:
    """Of each token of a request: itself, the request, the first slot it sees and the end."""
    loc, counts, lens, first_slots = (requests[n] for n in ("query_start_loc", "query_lens", "seq_lens", "seq_starts"))
    assert loc is not None and counts is not None and lens is not None
    return [
        (int(loc[i]) + j, i, 0 if first_slots is None else int(first_slots[i]), int(lens[i]) - n + j + 1)
        for i, n in enumerate(counts.tolist())
        for j in range(n)
    ]


def dense_decode(
    q: tuple[Tensor, Tensor], cache: Tensor, requests: dict[str, Tensor | None], most: int, scale: float
) -> Tensor:
    """Of requests with room for at most so many tokens; zeros for all others."""
    latent, rope = (x.double() for x in q)
    loc = requests["query_start_loc"]
    assert loc is not None
    out = torch.zeros(latent.shape, dtype=torch.float64)
    for token, i, first, end in seen_by_tokens(requests):
        if first < end and loc[i + 1] - loc[i] <= most:
            keys, rotated = entries_of(cache, requests, i)[first:end].split([latent.shape[2], rope.shape[2]], dim=1)
            weights = torch.softmax((latent[token] @ keys.T + rope[token] @ rotated.T) * scale, dim=1)
            out[token] = weights @ keys
    return out


def dense_index_scores(
    q: Tensor, weights: Tensor, keys: Tensor, requests: dict[str, Tensor | None], max_keys: int, scale: float
) -> Tensor:
    """How much each key concerns each token; -inf for those that it does not see."""
    scores = torch.full((len(q), max_keys), -torch.inf, dtype=torch.float64)
    for token, i, first, end in seen_by_tokens(requests):
        for slot in range(first, end):
            products = q[token].double() @ entries_of(keys, requests, i)[slot] * scale
            scores[token, slot] = (weights[token].double() * products.clamp(min=0.0)).sum()
    return scores


def dense_sparse(
    q: tuple[Tensor, Tensor], cache: Tensor, requests: dict[str, Tensor | None], chosen: list[list[int]], scale: float
) -> Tensor:
    """Of each token attention to its own slots; zeros without any."""
    latent, rope = (x.double() for x in q)
    out = torch.zeros(latent.shape, dtype=torch.float64)
    for token, i, _, _ in seen_by_tokens(requests):
        if chosen[token]:
            keys, rotated = entries_of(cache, requests, i)[chosen[token]].split([latent.shape[2], rope.shape[2]], dim=1)
            weights = torch.softmax((latent[token] @ keys.T + rope[token] @ rotated.T) * scale, dim=1)
            out[token] = weights @ keys
    return out
