"""A block head over the hash model: right if and only if its context, its block, positions and places are.

The target's states after no, one and both layers hold a token, what it becomes, and what the layers have seen. Stored
as keys of the head's two layers they add up to what the target has seen of the text, so the next states follow from the
newest token on. A block's own keys are part of the sums: where one is missing, or of another token or position, the
rest is not what the target has seen. Where anything is wrong the drafts are random.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from slipstream.attention.backend import AttentionLayer
from slipstream.attention.context import AttentionContext
from slipstream.attention.grouped_query import GroupedQueryStep
from slipstream.config import ModelConfig
from slipstream.device.operation import TensorSpec, operation
from slipstream.models.heads.network import BlockPlan
from tests.sim.hash_model import (
    MODEL_CONFIG,
    NUM_LAYERS,
    VOCAB_SIZE,
    UInts,
    attend,
    candidates,
    guess,
    hash_embedding,
    hash_logits,
    scramble,
)

MASK = 7
_WIDTH = MODEL_CONFIG.hidden_size


def _joined(x: np.ndarray) -> UInts:
    low, high = (np.nan_to_num(part, nan=0.0).astype(np.uint64) for part in (x[..., 0], x[..., 1]))
    return low | (high << np.uint64(32))


def _key_hash(state: UInts, position: UInts) -> UInts:
    """What a key adds to what the target's layer has seen."""
    return scramble(state * np.uint64(8191) + position * np.uint64(127) + position)


@operation(lambda features: (TensorSpec((features.shape[0], 4), features.dtype),) * NUM_LAYERS)
def context_keys(
    features: Tensor,  # [n, 18] float64: the stream after no, one and both layers
) -> tuple[Tensor, ...]:  # [n, 4] for each layer: the state it takes, the position, and what it has seen
    streams = features.view(len(features), NUM_LAYERS + 1, _WIDTH)
    last = streams[:, NUM_LAYERS]
    return tuple(
        torch.cat([streams[:, idx, :2], last[:, 2 + 2 * idx : 4 + 2 * idx]], dim=1) for idx in range(NUM_LAYERS)
    )


@operation(lambda x: TensorSpec((x.shape[0], _WIDTH), x.dtype))
def roll_blocks(
    x: Tensor,  # [n, 2] float64: tokens of the blocks as hashes, and their positions
    missing: Tensor,  # [layers, n, 2] float64: what each layer had seen before the first slot of the cache
    total: Tensor,  # [layers, n, 2] float64: what the cache adds up to, with the block's own keys
    query_start_loc: Tensor,  # [num_reqs + 1] int32
    query_lens: Tensor,  # [num_reqs] int32
    num_used: int,
    sayable: Tensor | None,  # [m] int32: the tokens that it can say; None: all
) -> Tensor:  # [n, 6]: at each place the state of the text before it; of the newest token, which says nothing, zeros
    out, tokens = np.zeros((len(x), _WIDTH)), x.numpy()
    says = frozenset(range(VOCAB_SIZE) if sayable is None else sayable.tolist())
    starts, lens = query_start_loc.tolist(), query_lens.tolist()
    for i, count in enumerate(lens):
        if count < 2:
            continue
        first, own = slice(starts[i], starts[i] + 1), slice(starts[i], starts[i] + count)
        ids, positions = tokens[own, 0].astype(np.uint64), tokens[own, 1].astype(np.uint64)
        is_block = (ids[1:] == MASK + 1).all() and (np.diff(positions) == 1).all()
        block = _key_hash(ids, positions).sum(keepdims=True)
        seen = [_joined(missing[idx, first].numpy()) + _joined(total[idx, first].numpy()) - block for idx in (0, 1)]
        state = ids[:1]
        for place in range(1, count):
            position = positions[place - 1 : place]
            for layer_idx in range(NUM_LAYERS):
                seen[layer_idx] = seen[layer_idx] + _key_hash(state, position)
                mixed = seen[layer_idx] + scramble(state + position * np.uint64(3) + np.uint64(layer_idx))
                state = scramble(mixed) >> np.uint64(16)
            shown = state if is_block else scramble(state) >> np.uint64(16)
            out[starts[i] + place, :2] = float(shown[0]), float(position[0])
            state = np.array([1 + _said(int(state[0]), num_used, says)], dtype=np.uint64)
    return torch.from_numpy(out)


def _said(state: int, num_used: int, says: frozenset[int]) -> int:
    """The token that is drafted after a state, with which the next place goes on."""
    likely = (guess(state, num_used), *candidates(state, num_used)[1:], *sorted(says))
    return next(token for token in likely if token in says)


class HashBlockHead:
    def __init__(
        self, max_position: int, device: torch.device, num_used: int, draft_ids: Sequence[int] | None, size: int
    ) -> None:
        self.taps, self.config = tuple(range(NUM_LAYERS + 1)), config_of(draft_ids)
        self.block = BlockPlan(size, MASK, (False,) * NUM_LAYERS)
        self.target_ids: Tensor | None = None
        if draft_ids is not None:
            self.target_ids = torch.tensor(draft_ids, dtype=torch.int32).to(device)
        self._layers = [AttentionLayer(idx, 1, 1, 4, 1.0) for idx in range(NUM_LAYERS)]
        self._num_used = num_used
        self._cos_sin = torch.zeros(max_position, 2, 1, device=device)
        self._cos_sin[:, 0].fill_(1.0)

    def write_context(self, features: Tensor, context: AttentionContext) -> Tensor:
        for layer, keys in zip(self._layers, context_keys(features), strict=True):
            key, step = keys.unsqueeze(1), context.at(layer)
            assert isinstance(step, GroupedQueryStep)
            step.store(layer, key, key.flip(-1), self._cos_sin, None)
        return features

    def forward(self, input_ids: Tensor, contexts: dict[bool, AttentionContext]) -> Tensor:
        context = contexts[False]
        x = hash_embedding(input_ids, context.positions)
        found = [attend(context, layer, x, self._cos_sin) for layer in self._layers]
        missing, total = (torch.stack(parts) for parts in zip(*found, strict=True))
        common = context.shared[0]
        return roll_blocks(
            x, missing, total, common.query_start_loc, common.query_lens, self._num_used, self.target_ids
        )

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits = hash_logits(hidden, self._num_used, True)
        return logits if self.target_ids is None else logits.index_select(1, self.target_ids)


def config_of(draft_ids: Sequence[int] | None) -> ModelConfig:
    return replace(
        MODEL_CONFIG, architecture="hash block", vocab_size=VOCAB_SIZE if draft_ids is None else len(draft_ids)
    )
