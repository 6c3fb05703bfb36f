"""An encoder for the hash model: each entry of its output is a hash of the frames it is made of.

A layer of cross attention adds up the hashes of all entries that it finds through the page table of the encoder: one
wrong page, one entry too many or too few, one of another request, and every token after it is another one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from slipstream.attention.backend import AttentionLayer
from slipstream.attention.context import AttentionContext
from slipstream.attention.cross import CrossSpec
from slipstream.device.operation import TensorSpec, operation
from slipstream.models.source_encoder import EncodedLayer
from slipstream.source_encoder_config import SourceEncoderConfig
from tests.sim.hashes import read_whole, scramble

NUM_BINS, FRAMES_PER_ENTRY, MAX_ENTRIES = 2, 2, 11
NUM_LAYERS = 2
CROSS_SPEC = CrossSpec(num_kv_heads=1, head_dim=4, max_entries=MAX_ENTRIES)
SOURCE_CONFIG = SourceEncoderConfig(NUM_BINS, FRAMES_PER_ENTRY * MAX_ENTRIES, FRAMES_PER_ENTRY, 1, 1, 1)
_OWN = 53  # tells what a layer of cross attention makes of a state from what others do


@operation(lambda features: TensorSpec((features.shape[1] // FRAMES_PER_ENTRY, 1, 4), torch.float64))
def hash_encode(
    features: Tensor,  # [NUM_BINS, num_frames] float64: whole numbers
    layer_idx: int,
) -> Tensor:  # [num_entries, 1, 4]: hash, number of the entry, the same number, 0
    frames = read_whole(features.numpy()).reshape(NUM_BINS, -1, FRAMES_PER_ENTRY)
    index = np.arange(frames.shape[1], dtype=np.uint64)
    mixed = index * np.uint64(FRAMES_PER_ENTRY) + np.uint64(layer_idx)
    for part in frames.transpose(0, 2, 1).reshape(-1, frames.shape[1]):
        mixed = scramble(mixed * np.uint64(8191) + part)
    columns = (mixed >> np.uint64(16), index, index, 0 * index)
    return torch.from_numpy(np.stack(columns, axis=1).astype(np.float64)).unsqueeze(1)


class HashSourceEncoder:
    def encode(self, features: Tensor) -> Iterator[EncodedLayer]:
        for idx in range(NUM_LAYERS):
            keys = hash_encode(features, idx)
            yield EncodedLayer(NUM_LAYERS + idx, keys, keys.flip(-1))


@operation(like="q")
def hash_cross_attention(
    q: Tensor,  # [num_tokens, 1, 4] float64: hash, position, 0, 0
    kv_cache: Tensor,  # [num_pages, 2, 1, page_size, 4] float64; values are keys turned round
    query_start_loc: Tensor,  # [num_reqs + 1] int32
    query_lens: Tensor,  # [num_reqs] int32
    lens: Tensor,  # [num_reqs] int32: entries of each request
    block_table: Tensor,  # [num_reqs, max_encoder_pages] int32
    max_len: int,  # the host's bound
    layer_idx: int,
) -> Tensor:  # [num_tokens, 1, 4]: hash of all entries and of the token, position, 0, 0
    out, page_size = np.zeros(q.shape), kv_cache.shape[3]
    starts, alive, queries = query_start_loc.tolist(), query_lens.tolist(), q.numpy()
    for i, length in enumerate(lens.tolist()):
        if not alive[i]:
            continue
        if not 0 < length <= min(max_len, block_table.shape[1] * page_size):
            raise ValueError(f"{length} entries, a bound of {max_len}")
        page_ids = block_table[i, : -(-length // page_size)].numpy()
        if (page_ids <= 0).any():
            raise IndexError("reads the null page, or none at all")
        keys, values = (read_whole(kv_cache[page_ids, side, 0].reshape(-1, 4)[:length].numpy()) for side in (0, 1))
        if not np.array_equal(keys, values[:, ::-1]) or keys[:, 1].tolist() != [*range(length)]:
            raise ValueError("entries of different requests, or out of order")
        seen = np.sum(scramble(keys[:, 0] * np.uint64(127) + keys[:, 1]), keepdims=True)
        own = read_whole(queries[starts[i] : starts[i] + alive[i], 0])
        salt = np.uint64(layer_idx * _OWN)
        mixed = seen + scramble(own[:, 0] + own[:, 1] * np.uint64(3) + salt)
        out[starts[i] : starts[i] + alive[i], 0, 0] = (scramble(mixed) >> np.uint64(16)).astype(np.float64)
        out[starts[i] : starts[i] + alive[i], 0, 1] = own[:, 1]
    return torch.from_numpy(out)


def attend_encoded(context: AttentionContext, idx: int, x: Tensor) -> Tensor:
    """Two numbers a token, hash and position."""
    layer = AttentionLayer(NUM_LAYERS + idx, 1, 1, 4, 1.0)
    q = torch.cat([x, torch.zeros_like(x)], dim=1).unsqueeze(1)
    return context.run(layer, q).flatten(1)[:, :2]
