"""A draft head over the hash model: right if and only if its cache, hidden states, positions and pairs of tokens are.

A hidden state of the target holds what its layers have seen, so with the next token the next state can be computed.
The head reads the state after two layers, which must belong to each other, or after the final norm, and its own
cache: with what the target had seen at the first slot, which is stored beside the key, the keys it finds from there
on must add up to what the target has seen of the tokens. Where it is made of several modules, each has a cache of its
own, takes only what the one before has left, and is wrong at states of its own. Where anything else is wrong it guesses
at random.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.attention.backend import AttentionLayer
from slipstream.attention.context import AttentionContext
from slipstream.attention.grouped_query import GroupedQueryStep
from slipstream.config import ModelConfig
from slipstream.device.operation import TensorSpec, operation
from tests.sim.hash_latent import SPEC
from tests.sim.hash_model import (
    HEAD_SCALE,
    MODEL_CONFIG,
    NUM_LAYERS,
    VOCAB_SIZE,
    attend,
    hash_embedding,
    hash_logits,
)
from tests.sim.hashes import UInts, halves, scramble

# The target's stream; who made it: 0 for the target, the number of the module and 1 for the head; what the target had
# seen at the first slot of the first module's keys, which the others cannot know: there is no state before it.
_WIDTH = MODEL_CONFIG.hidden_size + 3


def _joined(x: np.ndarray) -> UInts:
    low, high = (np.nan_to_num(part, nan=0.0).astype(np.uint64) for part in (x[:, 0], x[:, 1]))
    return low | (high << np.uint64(32))


class HeadShape(NamedTuple):
    """What differs between the heads of one world and another."""

    taps: tuple[int, ...] = (1, 2)  # empty: after the final norm
    num_modules: int = 1
    draft_ids: Sequence[int] | None = None  # the target's tokens that it can say, in its own order; None: all
    is_latent: bool = False  # whether its layers keep latents

    @property
    def config(self) -> ModelConfig:
        size = VOCAB_SIZE if self.draft_ids is None else len(self.draft_ids)
        return replace(
            MODEL_CONFIG,
            architecture="hash head",
            num_layers=self.num_modules,
            hidden_size=_WIDTH,
            vocab_size=size,
            layer_caches=(SPEC,) * self.num_modules if self.is_latent else (),
        )


def _behind_target(stream: np.ndarray) -> Tensor:
    return torch.from_numpy(np.concatenate([stream, np.zeros((len(stream), 3))], axis=1))


@operation(lambda features: TensorSpec((features.shape[0], _WIDTH), features.dtype))
def join_taps(
    features: Tensor,  # [n, 12] float64: the stream after one layer and after both
) -> Tensor:  # [n, 9]: the second; what does not belong to the first is no state
    first, last = features.numpy()[:, :6], features.numpy()[:, 6:]
    agree = (first[:, 1] == last[:, 1]) & (first[:, 2:4] == last[:, 2:4]).all(1)
    return _behind_target(np.where(agree[:, None], last, [0.0, -1.0, 0.0, 0.0, 0.0, 0.0]))


@operation(lambda features: TensorSpec((features.shape[0], _WIDTH), features.dtype))
def read_normed(
    features: Tensor,  # [n, 6] float64: the stream after the final norm, which doubles it
) -> Tensor:  # [n, 9]
    return _behind_target(features.numpy() / 2)


@operation(like="own")
def key_of(
    own: Tensor,  # [n, 2] float64: the token at p + 1 as a hash, and p + 1
    hidden: Tensor,  # [n, 9] float64: the state at p
    positions: Tensor,  # [n] int64: p
    module_idx: int,
    query_start_loc: Tensor,  # [num_reqs + 1] int32
    seq_starts: Tensor | None,  # [num_reqs] int32
) -> Tensor:  # [n, 2]: of another token where the state is not what the module before has made of p - 1
    before, slot, first = hidden.numpy(), positions.numpy(), np.zeros(len(positions), dtype=np.int64)
    if seq_starts is not None:
        request = np.searchsorted(query_start_loc.numpy()[1:], np.arange(len(slot)), side="right")
        first = seq_starts.numpy()[np.minimum(request, len(seq_starts) - 1)]
    # The first tokens have no module before them that had one before it.
    right = (slot < first + module_idx) | ((before[:, 1] == slot) & (before[:, 6] == module_idx))
    return torch.from_numpy(own.numpy() + np.where(right[:, None], 0.0, [1000.0, 0.0]))


@operation(like="hidden")
def next_state(
    hidden: Tensor,  # [n, 9] float64: the state at p
    own: Tensor,  # [n, 2] float64: the token at p + 1 as a hash, and p + 1
    first_seen: Tensor,  # [n, 2] float64: what the target had seen at the first slot of the head's own cache
    own_seen: Tensor,  # [n, 2] float64: what that cache adds up to
    positions: Tensor,  # [n] int64: p
    module_idx: int,
) -> Tensor:  # [n, 9]: the state at p + 1
    before, token, slot = hidden.numpy(), own.numpy(), positions.numpy()
    position = (slot + 1).astype(np.uint64)
    state, seen = token[:, 0].astype(np.uint64), []
    for layer_idx in range(NUM_LAYERS):
        key = state * np.uint64(8191) + position * np.uint64(127) + position
        seen.append(_joined(before[:, 2 + 2 * layer_idx : 4 + 2 * layer_idx]) + scramble(key))
        mixed = seen[-1] + scramble(state + position * np.uint64(3) + np.uint64(layer_idx))
        state = scramble(mixed) >> np.uint64(16)
    # All keys of the cache are the target's of the next tokens, so only those up to its first slot are missing.
    missing = _joined(first_seen.numpy())
    right = (missing + _joined(own_seen.numpy()) == seen[0]) & (before[:, 1] == slot)
    if module_idx:
        right &= before[:, 6] == module_idx
    state = np.where(right, state, scramble(state + np.uint64(1)) >> np.uint64(16))
    columns = [state.astype(np.float64)[:, None], position.astype(np.float64)[:, None], *map(halves, seen)]
    columns += [np.full((len(state), 1), 1.0 + module_idx), halves(missing)]
    return torch.from_numpy(np.concatenate(columns, axis=1))


class HashHead:
    def __init__(self, max_position: int, device: torch.device, num_used: int, shape: HeadShape) -> None:
        self.taps, self.config = shape.taps, shape.config
        self.target_ids: Tensor | None = None
        if shape.draft_ids is not None:
            self.target_ids = torch.tensor(shape.draft_ids, dtype=torch.int32).to(device)
        self._layers = [AttentionLayer(idx, 1, 1, 4, HEAD_SCALE) for idx in range(shape.num_modules)]
        self._num_used = num_used
        self._cos_sin = torch.zeros(max_position, 2, 1, device=device)
        self._cos_sin[:, 0].fill_(1.0)

    def combine(self, features: Tensor) -> Tensor:
        return join_taps(features) if self.taps else read_normed(features)

    def forward(self, module_idx: int, input_ids: Tensor, hidden: Tensor, context: AttentionContext) -> Tensor:
        own, layer = hash_embedding(input_ids, context.positions + 1), self._layers[module_idx]
        if module_idx == 0:
            first_seen, seen = attend(context, layer, own, self._cos_sin, hidden[:, 2:4])
        else:
            common = getattr(context.shared[0], "common", context.shared[0])
            starts = (common.query_start_loc, common.seq_starts)
            key = key_of(own, hidden, context.positions, module_idx, *starts)
            first_seen, (_, seen) = hidden[:, 7:9], attend(context, layer, key, self._cos_sin)
        return next_state(hidden, own, first_seen, seen, context.positions, module_idx)

    keeps_keys_alone = True

    def write_keys(self, input_ids: Tensor, hidden: Tensor, context: AttentionContext) -> None:
        own = hash_embedding(input_ids, context.positions + 1)
        key = torch.cat([own, hidden[:, 2:4]], dim=1).unsqueeze(1)
        step: GroupedQueryStep = context.at(self._layers[0])  # or one that takes the same arguments
        step.store(self._layers[0], key, key.flip(-1), self._cos_sin, None)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Of the tokens it can say: where the likeliest is none of them the next likely one comes first."""
        logits = hash_logits(hidden, self._num_used, True)
        return logits if self.target_ids is None else logits.index_select(1, self.target_ids)
