"""A model that replaces a network: its next token is a hash of everything it can read through the page table.

Every token leaves its own hash and position in the cache, layer by layer. One wrong page, slot, position or token, one
value of another request or of an earlier step, and every token after it is another one. Hidden states are hashes too:
whatever is computed from a wrong one is wrong. Numbers stay below 2**48, so that float64 holds them exactly.

A variant with an encoder has layers of cross attention, which add up hashes of what the encoder has read.

A recurrent variant has one more layer at the end. Its state is a hash of every token so far, kept as a delta net's
is, and decides every fourth token: one state of another token, step or request, and it is another chain from there on.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.attention.backend import AttentionLayer, Caps
from slipstream.attention.context import NORMED, AttentionContext
from slipstream.attention.gdn import DeltaNetSpec, GDNStep
from slipstream.attention.grouped_query import NewHeads
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.config import ModelConfig, RopeConfig
from slipstream.device.operation import TensorSpec, operation
from slipstream.models.model_state import ModelState
from slipstream.models.pooled_head import PooledHead
from tests.sim.hash_source_encoder import HashSourceEncoder, attend_encoded, hash_cross_attention
from tests.sim.hashes import UInts, halves, read_whole, scramble

VOCAB_SIZE = 61
# How the one layer of a draft head is told from the target's.
HEAD_LAYER, HEAD_SCALE = 99, 2.0
NUM_LAYERS = 2
MODEL_CONFIG = ModelConfig(
    architecture="hash",
    vocab_size=VOCAB_SIZE,
    hidden_size=2 + 2 * NUM_LAYERS,
    intermediate_size=2,
    num_layers=NUM_LAYERS,
    num_heads=1,
    num_kv_heads=1,
    head_dim=4,
    rms_norm_eps=1e-5,
    max_position=512,
    rope=RopeConfig(rotary_dim=2),
    dtype="float64",
)
_NET = DeltaNetSpec(num_k_heads=1, num_v_heads=1, k_dim=1, v_dim=2, conv_width=3)
RECURRENT_CONFIG = replace(
    MODEL_CONFIG, num_layers=NUM_LAYERS + 1, layer_caches=(*[MODEL_CONFIG.keys_and_values] * NUM_LAYERS, _NET)
)


@operation(like="q")
def hash_attention(
    q: Tensor,  # [num_tokens, 1, 4] float64: hash, position, 0, 0; in a head's two what the target has seen so far
    kv_cache: Tensor,  # [num_pages, 2, 1, page_size, 4] float64; values are keys turned round
    query_start_loc: Tensor,  # [num_reqs + 1] int32
    query_lens: Tensor,  # [num_reqs] int32: how many of a request's tokens are alive
    seq_lens: Tensor,  # [num_reqs] int32
    block_table: Tensor,  # [num_reqs, max_pages] int32
    max_seq_len: int,  # the host's bounds, by which a kernel would size its grid
    max_query_len: int,
    layer_idx: int,
    seq_starts: Tensor | None = None,  # [num_reqs] int32: the first slot whose keys are there; None: 0 for all
    num_common_pages: int = 0,  # read for all from the first request's table, as a kernel that reads them once would
) -> Tensor:
    """[num_tokens, 1, 4]: hash of the keys up to each token and of itself, position, sum of those keys' hashes.

    A head gets the last two numbers of its first key instead of hash and position.
    """
    out = np.zeros(q.shape)
    starts, alive, page_size = query_start_loc.tolist(), query_lens.tolist(), kv_cache.shape[3]
    first_slots = [0] * len(alive) if seq_starts is None else seq_starts.tolist()
    cache, queries = kv_cache.numpy(), q.numpy()
    for i, length in enumerate(seq_lens.tolist()):
        begin, end = starts[i], starts[i] + alive[i]
        if not 0 <= alive[i] <= starts[i + 1] - begin:
            raise ValueError(f"{alive[i]} living tokens of {starts[i + 1] - begin}")
        if length == 0 or begin == end:
            continue
        if not 0 <= end - begin <= length <= min(max_seq_len, block_table.shape[1] * page_size):
            raise ValueError(f"{end - begin} queries, {length} keys, a bound of {max_seq_len}")
        if end - begin > max_query_len:
            raise ValueError(f"{end - begin} queries, a bound of {max_query_len}")
        if length - (end - begin) < num_common_pages * page_size:
            raise ValueError(f"{end - begin} of {length} tokens begin within {num_common_pages} common pages")
        begin = max(begin, end - (length - first_slots[i]))  # tokens before the first slot see nothing
        if begin >= end:
            continue
        table = torch.cat([block_table[0, :num_common_pages], block_table[i, num_common_pages:]])
        keys = _read_keys(cache, table.numpy(), first_slots[i], length)
        # A head's keys are those of the next tokens: at slot p that of the token at p + 1.
        index = np.arange(first_slots[i], length, dtype=np.uint64) + np.uint64(layer_idx == HEAD_LAYER)
        sums = np.cumsum(scramble(keys[:, 0] * np.uint64(8191) + keys[:, 1] * np.uint64(127) + index))
        seen, own = sums[len(sums) - (end - begin) :], read_whole(queries[begin:end, 0])
        mixed = seen + scramble(own[:, 0] + own[:, 1] * np.uint64(3) + np.uint64(layer_idx))
        out[begin:end, 0, 0] = (scramble(mixed) >> np.uint64(16)).astype(np.float64)
        out[begin:end, 0, 1] = queries[begin:end, 0, 1]
        out[begin:end, 0, 2:] = halves(seen)
        if layer_idx == HEAD_LAYER:
            out[begin:end, 0, :2] = keys[0, 2:]
    return torch.from_numpy(out)


def _read_keys(cache: npt.NDArray[np.float64], page_ids: npt.NDArray[np.int32], first: int, end: int) -> UInts:
    """A request's keys from slot to slot: [end - first, 4]. Slots before and after are not read."""
    page_size = cache.shape[3]
    pages, skipped = page_ids[first // page_size : -(-end // page_size)], first // page_size * page_size
    if (pages <= 0).any():
        raise IndexError("reads the null page, or none at all")
    keys, values = (read_whole(cache[pages, i, 0].reshape(-1, 4)[first - skipped : end - skipped]) for i in (0, 1))
    if not np.array_equal(keys, values[:, ::-1]):
        raise ValueError("keys and values of different tokens")
    return keys


@operation(like="q")
def hash_block_attention(
    q: Tensor,  # [num_tokens, 1, 4] float64; this and the others: see ``hash_attention``
    kv_cache: Tensor,
    query_start_loc: Tensor,
    query_lens: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_seq_len: int,
    max_query_len: int,
    seq_starts: Tensor,
) -> Tensor:
    """[num_tokens, 1, 4], the same for all tokens of a request, which see each other.

    What the target had seen before the first slot, by the key there; and the sum of the hashes of all keys.
    """
    out, cache = np.zeros(q.shape), kv_cache.numpy()
    starts, alive, first_slots = (x.tolist() for x in (query_start_loc, query_lens, seq_starts))
    for i, length in enumerate(seq_lens.tolist()):
        if not 0 <= alive[i] <= min(starts[i + 1] - starts[i], max_query_len) or alive[i] > length:
            raise ValueError(f"{alive[i]} living tokens, {length} keys, a bound of {max_query_len}")
        if not alive[i]:
            continue
        if length > min(max_seq_len, block_table.shape[1] * kv_cache.shape[3]):
            raise ValueError(f"{length} keys, a bound of {max_seq_len}")
        keys = _read_keys(cache, block_table[i].numpy(), first_slots[i], length)
        index = np.arange(first_slots[i], length, dtype=np.uint64)
        hashes = scramble(keys[:, 0] * np.uint64(8191) + keys[:, 1] * np.uint64(127) + index)
        has_gap = 0 < first_slots[i] < length - alive[i]  # elsewhere the target had seen nothing before
        own = slice(starts[i], starts[i] + alive[i])
        if has_gap:
            out[own, 0, :2] = halves((keys[:1, 2] | keys[:1, 3] << np.uint64(32)) - hashes[:1])
        out[own, 0, 2:] = halves(hashes.sum(keepdims=True))
    return torch.from_numpy(out)


@operation(like="x", writes=("inputs", "states"))
def hash_recurrence(
    x: Tensor,  # [num_tokens, 2] float64: hash, position
    inputs: Tensor,  # [num_rows, ring, 4] float64: hashes of the last tokens; the rest is not used
    states: Tensor,  # [num_rows, ring, 1, 1, 2] float64
    slots: Tensor,  # [num_reqs] int32; this and the next three: see kernels/request_rows
    starts: Tensor,  # [num_reqs] int32
    counts: Tensor,  # [num_reqs] int32
    positions: Tensor,  # [num_reqs] int32
    max_count: int,  # the host's bounds, by which a kernel would size its grid
    in_chunks: bool,
) -> Tensor:  # [num_tokens, 2]: another hash for every fourth state, position
    out, ring = torch.zeros_like(x), states.shape[1]
    for slot, start, count, first in zip(*(t.tolist() for t in (slots, starts, counts, positions)), strict=True):
        if count > max_count or (count > ring and not in_chunks):
            raise ValueError(f"{count} tokens, a bound of {max_count}, {ring} states")
        own = [int(value) for value in x[start : start + count, 0].tolist()]
        kept = inputs[slot, :, 0].tolist()
        chain = 0 if first == 0 else _from_halves(states[slot, first % ring, 0, 0].tolist())
        for i, state in enumerate(own):
            position = first + i
            before = [own[i - back] if i >= back else int(kept[(position - back) % len(kept)]) for back in (1, 2)]
            before = [value if position >= back else 0 for back, value in zip((1, 2), before, strict=True)]
            chain = next_chain(chain, state, *before, position)
            out[start + i, 0], out[start + i, 1] = chained(chain, state), x[start + i, 1]
            if count <= ring or i == count - 1:  # of a longer run the last stays
                low, high = float(chain & 0xFFFFFFFF), float(chain >> 32)
                states[slot, (position + 1) % ring, 0, 0] = torch.tensor([low, high], dtype=states.dtype)
            if i >= count - len(kept):
                inputs[slot, position % len(kept), 0] = float(state)
    return out


def _from_halves(values: list[float]) -> int:
    return int(values[0]) | int(values[1]) << 32


def _scramble_one(x: int) -> int:
    return int(scramble(np.array([x & 2**64 - 1], dtype=np.uint64))[0])


def next_chain(chain: int, state: int, before: int, before_that: int, position: int) -> int:
    return _scramble_one(chain * 8191 + state + 3 * before + 5 * before_that + 127 * position)


def chained(chain: int, state: int) -> int:
    """Every fourth token is a matter of all before it; the others are what a drafter without states can say too."""
    return state if chain % 4 else _scramble_one(chain + state) >> 16


@operation(lambda token_ids, positions: TensorSpec((token_ids.shape[0], 2), torch.float64))
def hash_embedding(
    token_ids: Tensor,  # [num_tokens] int32
    positions: Tensor,  # [num_tokens] int64
) -> Tensor:  # [num_tokens, 2] float64: hash, position
    if not ((token_ids >= 0).all() and (token_ids < VOCAB_SIZE).all()):
        raise IndexError("a token outside the vocabulary")
    # Token 0 is not 0: what a padding token writes where it must not write shows.
    return torch.stack([token_ids.double() + 1, positions.double()], dim=1)


def candidates(state: int, num_used: int) -> list[int]:
    """The three likeliest tokens after a state, of the first so many, likeliest first; they may coincide."""
    return [state % num_used, state // VOCAB_SIZE % num_used, state // VOCAB_SIZE**2 % num_used]


def guess(state: int, num_used: int, module_idx: int = 0) -> int:
    """What the drafter takes for the likeliest token: wrong for every fourth state, each module for others."""
    return (state + (state // VOCAB_SIZE**3 % 4 == module_idx % 4)) % num_used


@operation(lambda hidden, num_used, guesses: TensorSpec((hidden.shape[0], VOCAB_SIZE), torch.float32))
def hash_logits(
    hidden: Tensor,  # [n, 6] float64, or more: first the number of the head's module, counted from 1
    num_used: int,
    guesses: bool,
) -> Tensor:  # [n, VOCAB_SIZE] float32: far apart, so that noise at any temperature changes nothing
    # Where all likely ones are forbidden the lowest of the others comes next.
    logits = (-1e3 * torch.arange(VOCAB_SIZE)).repeat(hidden.shape[0], 1)
    states = hidden[:, 0].nan_to_num(0.0).long()
    for divisor, value in ((VOCAB_SIZE**2, 1e5), (VOCAB_SIZE, 2e5)):
        logits.scatter_(1, (states // divisor % num_used).unsqueeze(1), value)
    module = hidden[:, 6].nan_to_num(0.0).long() - 1 if hidden.shape[1] > 6 else 0
    first = states + (states // VOCAB_SIZE**3 % 4 == module % 4) if guesses else states
    return logits.scatter_(1, (first % num_used).unsqueeze(1), 3e5)


class HashBackend:
    caps: ClassVar[Caps] = Caps(dtypes=("float64",), host_lengths="none", graph_support="always")
    num_cascades: int = 0  # layers that were asked to read common pages once

    def step_buffers(self) -> tuple[Tensor, ...]:
        return ()

    def build(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        return common

    def starting_at(self, metadata: Any, seq_starts: Tensor) -> Any:
        return replace(metadata, seq_starts=seq_starts)

    def run(self, layer: AttentionLayer, q: Tensor, kv_cache: Tensor, metadata: CommonAttentionMetadata) -> Tensor:
        tables = (metadata.query_start_loc, metadata.query_lens, metadata.seq_lens, metadata.block_table)
        layer_idx = HEAD_LAYER if layer.scale == HEAD_SCALE else layer.idx
        bounds = (metadata.max_seq_len, metadata.max_query_len)
        if not metadata.is_causal and metadata.seq_starts is None:  # over the output of a source encoder
            return hash_cross_attention(q, kv_cache, *tables, metadata.max_seq_len, layer.idx)
        if not metadata.is_causal:
            return hash_block_attention(q, kv_cache, *tables, *bounds, metadata.seq_starts)
        num_common = metadata.num_common_pages
        self.num_cascades += num_common > 0
        return hash_attention(q, kv_cache, *tables, *bounds, layer_idx, metadata.seq_starts, num_common)


def attend(
    context: AttentionContext, layer: AttentionLayer, x: Tensor, cos_sin: Tensor, more: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Two and two numbers a token; ``more`` are what a head keeps beside its keys."""
    q = torch.cat([x, torch.zeros_like(x) if more is None else more], dim=1).unsqueeze(1)
    out = context.run(layer, NewHeads(q, q, q.flip(-1), cos_sin)).flatten(1)
    return out[:, :2], out[:, 2:]


def _stream(x: Tensor, seen: list[Tensor]) -> Tensor:
    missing = [torch.zeros_like(x)] * (NUM_LAYERS - len(seen))
    return torch.cat([x, *seen, *missing], dim=1)


def _recur(context: AttentionContext, x: Tensor) -> Tensor:
    own: GDNStep = context.group_steps[context.group_of_layer[NUM_LAYERS]]  # type: ignore[assignment]
    step = own.metadata
    requests = (step.slots, step.starts, step.counts, step.positions)
    return hash_recurrence(x, *own.backend.memory[NUM_LAYERS], *requests, step.max_count, step.in_chunks)


class HashModel:
    """The target or, where it guesses, a drafter: its states are the target's if its cache and its inputs are right."""

    state: ModelState | None = None
    pooled_head: PooledHead | None = None

    def __init__(
        self,
        max_position: int,
        device: torch.device,
        num_used: int = VOCAB_SIZE,
        guesses: bool = False,
        recurrent: bool = False,
        encoder: HashSourceEncoder | None = None,
    ) -> None:
        self._choice, self._recurrent, self.source_encoder = (num_used, guesses), recurrent, encoder
        self._layers = [AttentionLayer(idx, 1, 1, 4, 1.0) for idx in range(NUM_LAYERS)]
        # A rotation by nothing: the hash itself goes into the cache.
        self._cos_sin = torch.zeros(max_position, 2, 1, device=device)
        self._cos_sin[:, 0].fill_(1.0)

    def forward_first(self, input_ids: Tensor, context: AttentionContext, num_layers: int) -> Tensor:
        assert num_layers == NUM_LAYERS
        return self.forward(input_ids, context)

    def forward(self, input_ids: Tensor, context: AttentionContext) -> Tensor:
        """Hidden states are hash and position, and what each layer has seen: a head goes on from there."""
        x, seen = hash_embedding(input_ids, context.positions), []
        for idx, layer in enumerate(self._layers):
            context.tap(idx, _stream(x, seen))
            x, own = attend(context, layer, x, self._cos_sin)
            seen.append(own)
            if self.source_encoder is not None:
                x = attend_encoded(context, idx, x)
        stream = _stream(x, seen)
        context.tap(NUM_LAYERS, stream)
        if self._recurrent:
            stream = _stream(_recur(context, x), seen)
        if NORMED in context.taps:
            context.tap(NORMED, stream + stream)  # another than the stream, so that the two cannot be confused
        return stream

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hash_logits(hidden, *self._choice)
