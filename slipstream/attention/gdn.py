"""Gated delta nets: layers that keep a state of fixed size for each request instead of keys.

A request's states are in its row, so no slots are allocated. Which of a row's states is current follows from the
position at which a step begins, on the device. Position 0 begins with a zero state, whatever the row's previous request
left; states of rejected drafts are overwritten. Nothing has to be cleared, copied or rolled back.

The host knows which requests may have drafts and the maximum tokens of each, and never reads the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from slipstream.attention.backend import Caps
from slipstream.attention.context import StepTokens
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.cache_spec import CacheSpec, Shape
from slipstream.kernels.recurrent.causal_conv import causal_conv
from slipstream.kernels.recurrent.delta_rule import DeltaTokens, chunked_delta_rule, recurrent_delta_rule
from slipstream.kernels.request_rows import RequestStates


@dataclass(frozen=True)
class DeltaNetSpec(CacheSpec):
    """The shape of such a layer: its sizes, and the states it keeps of a request."""

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    conv_width: int

    prefix_refusal: ClassVar[str] = (
        "the model's recurrent layers keep one state of a request, at its end, so a cached page has no state to "
        "continue from"
    )
    exact_refusal: ClassVar[str] = (
        "the model's recurrent layers compute prompts in chunks, and tokens one by one, which rounds in another way"
    )
    drafter_refusal: ClassVar[str] = "has recurrent layers, whose states would have to follow every draft"

    @property
    def num_channels(self) -> int:
        """Of queries, keys and values, which pass through the convolution."""
        return 2 * self.num_k_heads * self.k_dim + self.num_v_heads * self.v_dim

    def ring_lengths(self, num_drafts: int) -> tuple[int, int]:
        """Numbers of kept inputs and states, so that a step finds its own after any token of the step before."""
        num_states = 1 + num_drafts
        return self.conv_width - 1 + num_states, num_states

    def row_shapes(self, num_drafts: int) -> tuple[Shape, ...]:
        num_inputs, num_states = self.ring_lengths(num_drafts)
        inputs = Shape((num_inputs, self.num_channels))  # unprocessed
        # A state accumulates over a whole text, which 16 bits cannot represent.
        return inputs, Shape((num_states, self.num_v_heads, self.k_dim, self.v_dim), "wide")

    def working_values(self) -> int:
        """The input projection, the convolved values, the heads; and per token the 64 of its chunk, twice in the
        model's type and once in float32.
        """
        return 2 * self.num_channels + 3 * self.num_v_heads * self.v_dim + 4 * 64 * self.num_v_heads

    def open(self, setting: Any) -> Any:
        return GDNBackend(setting.memory)


class GDNLayer(NamedTuple):
    """The fixed properties of one layer of a model."""

    idx: int
    conv_weight: Tensor  # [channels, width]
    a_log: Tensor  # [v_heads]
    dt_bias: Tensor  # [v_heads]


class DeltaInputs(NamedTuple):
    """The output of a layer's input projection for the tokens."""

    qkv: Tensor  # [num_tokens, channels]
    a: Tensor  # [num_tokens, v_heads]: decay gate
    b: Tensor  # [num_tokens, v_heads]: update gate


class Parts(NamedTuple):
    """Requests of one kind in a step, and their tokens, unused draft slots included."""

    num_reqs: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class GDNAttentionMetadata:
    """One step's batch. Device tensors are exact and padded: padding requests have no tokens."""

    slots: Tensor  # [padded_reqs] int32: rows; the scratch row for padding
    starts: Tensor  # [padded_reqs] int32: index of each one's first token
    counts: Tensor  # [padded_reqs] int32: tokens in use
    positions: Tensor  # [padded_reqs] int32: of the first token
    max_count: int  # no request has more tokens
    in_chunks: bool  # some request may have more tokens than a row has states
    spec_sequence_masks_cpu: Tensor  # [num_reqs] bool, on the host: requests with draft slots
    spec_decodes: Parts
    decodes: Parts  # one token each and no draft slots
    prefills: Parts

    @classmethod
    def build(cls, common: CommonAttentionMetadata, num_states: int) -> GDNAttentionMetadata:
        """For any mix of speculative decodes, plain decodes and prefills, from host numbers and launches alone.

        Requests are not sorted by kind: the operations take any mix, and read on the device which tokens are in use.
        """
        assert common.batch_rows is not None, "states are indexed by rows, which the step lacks"
        lens = torch.from_numpy(np.diff(common.query_start_loc_cpu))
        spec = spec_sequence_masks(common)
        plain = (lens == 1) & ~spec
        return cls(
            slots=common.batch_rows,
            starts=common.query_start_loc[:-1],
            counts=common.query_lens,
            positions=common.seq_lens - common.query_lens,
            max_count=common.max_query_len,
            in_chunks=common.max_query_len > num_states,
            spec_sequence_masks_cpu=spec,
            spec_decodes=_count(lens, spec),
            decodes=_count(lens, plain),
            prefills=_count(lens, ~(spec | plain)),
        )


def spec_sequence_masks(common: CommonAttentionMetadata) -> Tensor:
    """[num_reqs] bool, on the host: indexing with a mask on the device would synchronise."""
    if common.num_drafts_cpu is None:
        return torch.zeros(common.num_reqs, dtype=torch.bool, device="cpu")
    return torch.from_numpy(common.num_drafts_cpu > 0)


def _count(lens: Tensor, mask: Tensor) -> Parts:
    return Parts(int(mask.sum()), int(lens[mask].sum()))


class GDNBackend:
    """The states of all rows, and the operations on them."""

    caps: ClassVar[Caps] = Caps(
        dtypes=("float64", "float32", "bfloat16", "float16"), host_lengths="bound", graph_support="always"
    )

    def __init__(self, memory: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        self.memory = memory  # by layer: the last inputs and the states of each row
        self.num_states = next(iter(memory.values()))[1].shape[1]

    def step_buffers(self) -> tuple[Tensor, ...]:
        return ()

    def build(self, common: CommonAttentionMetadata) -> GDNAttentionMetadata:
        return GDNAttentionMetadata.build(common, self.num_states)

    def begin(self, tokens: StepTokens, shared: Any = None) -> GDNStep:
        assert tokens.common is not None, "tokens without a batch have no states"
        return GDNStep(self, tokens.common)

    def can_share(self, other: Any) -> bool:
        return False

    def adapt(self, shared: Any, seq_starts: Tensor) -> NoReturn:
        raise RuntimeError("states follow the text from its first token; a drafter with gaps has none")

    def run(self, layer: GDNLayer, inputs: DeltaInputs, metadata: GDNAttentionMetadata) -> Tensor:
        """[num_tokens, v_heads, v_dim]; zero for unused draft slots."""
        qkv, a, b = inputs
        own_inputs, states = self.memory[layer.idx]
        requests = RequestStates(metadata.slots, metadata.starts, metadata.counts, metadata.positions)
        mixed = causal_conv(qkv, layer.conv_weight, None, own_inputs, requests, metadata.max_count)
        tokens = DeltaTokens(mixed, a, b, layer.a_log, layer.dt_bias)
        if metadata.in_chunks:
            return chunked_delta_rule(tokens, states, requests)
        return recurrent_delta_rule(tokens, states, requests, metadata.max_count)


@dataclass(slots=True)
class GDNStep:
    """One pass. The first layer builds the metadata, so that a graph of that layer contains it."""

    backend: GDNBackend
    common: CommonAttentionMetadata
    shared: None = None
    is_recorded: bool = True  # every length is read on the device
    _metadata: GDNAttentionMetadata | None = None

    @property
    def metadata(self) -> GDNAttentionMetadata:
        if self._metadata is None:
            self._metadata = self.backend.build(self.common)
        return self._metadata

    def prepare(self) -> None:
        """What the layers share, launched before the first layer's projection.

        Kernels after that projection start early and rely on what was written before it, not on work in between.
        """
        _ = self.metadata

    def run(self, layer: GDNLayer, inputs: DeltaInputs) -> Tensor:
        return self.backend.run(layer, inputs, self.metadata)

    def make_output(self, inputs: DeltaInputs) -> NoReturn:
        raise RuntimeError("layers with states are part of a captured piece")
