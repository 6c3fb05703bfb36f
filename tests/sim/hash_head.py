"""A draft head over the hash model: right if and only if its cache, hidden states, positions and pairs of tokens are.

A hidden state of the target holds what its layers have seen, so with the next token the next state can be computed.
The head looks at the state behind two layers, which must belong to each other, and at its own cache: the keys it finds
there must add up to what the target has seen of the tokens. Where anything is wrong it guesses at random.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from slipstream.attention.backend import AttentionContext, AttentionLayer
from slipstream.device.operation import TensorSpec, operation, spec_of
from tests.sim.hash_model import (
    HEAD_SCALE,
    MODEL_CONFIG,
    NUM_LAYERS,
    VOCAB_SIZE,
    UInts,
    attend,
    halves,
    hash_embedding,
    hash_logits,
    scramble,
)

HEAD_CONFIG = replace(MODEL_CONFIG, architecture="hash head", num_layers=1)
_FIRST_KEYS = scramble(np.arange(1, VOCAB_SIZE + 1, dtype=np.uint64) * np.uint64(8191))


def _joined(x: np.ndarray) -> UInts:
    low, high = (np.nan_to_num(part, nan=0.0).astype(np.uint64) for part in (x[:, 0], x[:, 1]))
    return low | (high << np.uint64(32))


@operation(lambda features: TensorSpec((features.shape[0], features.shape[1] // 2), features.dtype))
def join_taps(
    features: Tensor,  # [n, 12] float64: the stream after one layer and after both
) -> Tensor:  # [n, 6]: the second; what does not belong to the first is no state
    first, last = features.numpy()[:, :6], features.numpy()[:, 6:]
    agree = (first[:, 1] == last[:, 1]) & (first[:, 2:4] == last[:, 2:4]).all(1)
    return torch.from_numpy(np.where(agree[:, None], last, [0.0, -1.0, 0.0, 0.0, 0.0, 0.0]))


@operation(lambda hidden, own, own_seen, positions: spec_of(hidden))
def next_state(
    hidden: Tensor,  # [n, 6] float64: the state at p
    own: Tensor,  # [n, 2] float64: the token at p + 1 as a hash, and p + 1
    own_seen: Tensor,  # [n, 2] float64: what the head's own cache adds up to
    positions: Tensor,  # [n] int64: p
) -> Tensor:  # [n, 6]: the state at p + 1
    before, token, place = hidden.numpy(), own.numpy(), positions.numpy()
    position = (place + 1).astype(np.uint64)
    state, seen = token[:, 0].astype(np.uint64), []
    for layer_idx in range(NUM_LAYERS):
        key = state * np.uint64(8191) + position * np.uint64(127) + position
        seen.append(_joined(before[:, 2 + 2 * layer_idx : 4 + 2 * layer_idx]) + scramble(key))
        mixed = seen[-1] + scramble(state + position * np.uint64(3) + np.uint64(layer_idx))
        state = scramble(mixed) >> np.uint64(16)
    # All keys of the cache are the target's of the tokens behind, so its first token alone is missing.
    missing = seen[0] - _joined(own_seen.numpy())
    right = np.isin(missing, _FIRST_KEYS) & (before[:, 1] == place)
    state = np.where(right, state, scramble(state + np.uint64(1)) >> np.uint64(16))
    columns = [state.astype(np.float64)[:, None], position.astype(np.float64)[:, None], *map(halves, seen)]
    return torch.from_numpy(np.concatenate(columns, axis=1))


class HashHead:
    taps = (1, 2)
    config = HEAD_CONFIG
    target_ids: Tensor | None = None

    def __init__(self, max_position: int, device: torch.device, num_used: int) -> None:
        self._layer = AttentionLayer(0, 1, 1, 4, HEAD_SCALE)
        self._num_used = num_used
        self._cos_sin = torch.zeros(max_position, 2, 1, device=device)
        self._cos_sin[:, 0].fill_(1.0)

    def combine(self, features: Tensor) -> Tensor:
        return join_taps(features)

    def forward(self, step: int, input_ids: Tensor, hidden: Tensor, context: AttentionContext) -> Tensor:
        own = hash_embedding(input_ids, context.positions + 1)
        _, seen = attend(context, self._layer, own, self._cos_sin)
        return next_state(hidden, own, seen, context.positions)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hash_logits(hidden, self._num_used, True)
