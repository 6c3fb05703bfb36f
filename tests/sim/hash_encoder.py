"""An encoder that replaces a network: a token's hidden state is a hash of its whole text.

One token of another text, one text in two pieces, one row that does not run but is read: and the hash is another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from slipstream.attention.context import AttentionContext
from slipstream.attention.encoder import EncoderSpec, EncoderStep
from slipstream.device.operation import operation
from slipstream.encoder_config import EncoderConfig
from slipstream.models.model_state import ModelState
from slipstream.models.pooled_head import PooledHead
from slipstream.models.source_encoder import SourceEncoder
from tests.sim.hash_model import MODEL_CONFIG, NUM_LAYERS, hash_embedding, read_whole, scramble

ENCODER_CONFIG = replace(MODEL_CONFIG, layer_caches=(EncoderSpec(),) * NUM_LAYERS, encoder=EncoderConfig())
_MASK = 2**64 - 1


@operation(like="x")
def hash_texts(
    x: Tensor,  # [num_tokens, 2] float64: hash, position
    query_start_loc: Tensor,  # [num_reqs + 1] int32
    query_lens: Tensor,  # [num_reqs] int32
) -> Tensor:  # [num_tokens, 2]: hash of the text and of the token in it, position
    out = torch.zeros_like(x)
    for start, count in zip(query_start_loc[:-1].tolist(), query_lens.tolist(), strict=True):
        if not count:
            continue
        own = read_whole(x[start : start + count].numpy())
        if own[:, 1].tolist() != list(range(count)):
            raise ValueError("a text in pieces")
        total = scramble(own[:, 0] * np.uint64(8191) + own[:, 1] * np.uint64(127)).sum(dtype=np.uint64)
        states = scramble(total + scramble(own[:, 0] + own[:, 1] * np.uint64(3))) >> np.uint64(16)
        out[start : start + count, 0] = torch.from_numpy(states.astype(np.float64))
        out[start : start + count, 1] = x[start : start + count, 1]
    return out


class HashEncoder:
    state: ModelState | None = None
    pooled_head: PooledHead | None = None
    source_encoder: SourceEncoder | None = None

    def forward(self, input_ids: Tensor, context: AttentionContext) -> Tensor:
        step = context.group_steps[0]
        assert isinstance(step, EncoderStep)
        x = hash_texts(hash_embedding(input_ids, context.positions), *step.texts)
        return torch.cat([x, *[torch.zeros_like(x)] * NUM_LAYERS], dim=1)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        raise AssertionError("an encoder has no logits")


def encoded(token_ids: Sequence[int]) -> list[list[float]]:
    """The hidden states of a text, by plain integers."""

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
        return x ^ (x >> 31)

    own = [(token_id + 1, position) for position, token_id in enumerate(token_ids)]
    total = sum(mix((h * 8191 + p * 127) & _MASK) for h, p in own)
    return [[float(mix((total + mix(h + 3 * p)) & _MASK) >> 16), float(p), *[0.0] * (2 * NUM_LAYERS)] for h, p in own]
