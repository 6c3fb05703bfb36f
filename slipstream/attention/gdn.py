"""Gated delta nets: layers that keep a state of fixed size for each request where others keep keys.

A request's states lie in its row: the row is the slot, so nobody hands slots out. Which of a row's states counts is
said by the position a step begins at, on the device. Position 0 begins from nothing, whatever the row's last tenant
left; drafts that were rejected are written over. So there is nothing to clear, to copy or to roll back.

The host knows which requests may have drafts and how many tokens each has at most, and never asks the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.config import EngineConfig
from slipstream.kernels.causal_conv import causal_conv
from slipstream.kernels.delta_rule import chunked_delta_rule, recurrent_delta_rule


class GDNLayer(NamedTuple):
    """What is fixed about one layer of a model."""

    idx: int  # among the layers of its kind
    conv_weight: Tensor  # [channels, width]
    a_log: Tensor  # [v_heads]
    dt_bias: Tensor  # [v_heads]


class Parts(NamedTuple):
    """Requests of one kind in a step, and their tokens, dead ones included."""

    num_reqs: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class GDNAttentionMetadata:
    """One step's batch. Device tensors are exact and padded: who is padding has no living tokens."""

    slots: Tensor  # [padded_reqs] int32: rows; padding names the scratch row
    starts: Tensor  # [padded_reqs] int32: each one's first token
    counts: Tensor  # [padded_reqs] int32: living tokens
    positions: Tensor  # [padded_reqs] int32: of the first token
    max_count: int  # no request has more tokens
    in_chunks: bool  # some request may have more tokens than a row has states
    spec_sequence_masks_cpu: Tensor  # [num_reqs] bool, on the host: who has places for drafts
    spec_decodes: Parts
    decodes: Parts  # one token each, and no place for a draft
    prefills: Parts

    @classmethod
    def build(cls, common: CommonAttentionMetadata, num_states: int) -> GDNAttentionMetadata:
        """For any mix of speculative decodes, plain decodes and prefills, from host numbers and launches alone.

        Nothing is sorted apart by kind: the operations take any mix, and which tokens are alive they see themselves.
        """
        assert common.batch_rows is not None, "states lie by rows, and the step names none"
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
    """[num_reqs] bool. On the host, where indexing by it costs nothing; by one on the device, the host would wait."""
    if common.num_drafts_cpu is None:
        return torch.zeros(common.num_reqs, dtype=torch.bool, device="cpu")
    return torch.from_numpy(common.num_drafts_cpu > 0)


def _count(lens: Tensor, mask: Tensor) -> Parts:
    return Parts(int(mask.sum()), int(lens[mask].sum()))


class GDNBackend:
    """The states of all rows, and the layers' work on them."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        net = config.model.delta_net
        assert net is not None
        dtype = getattr(torch, config.dtype)
        num_rows = config.scheduler.max_num_seqs + 1
        num_inputs, self.num_states = net.ring_lengths(config.num_drafts)
        inputs_shape = (num_rows, num_inputs, net.num_channels)
        states_shape = (num_rows, self.num_states, net.num_v_heads, net.k_dim, net.v_dim)
        # Inputs are kept as they came. A state sums up a whole text, which 16 bits could not.
        wide = torch.promote_types(dtype, torch.float32)
        self.inputs = [torch.zeros(inputs_shape, dtype=dtype, device=device) for _ in net.layer_ids]
        self.states = [torch.zeros(states_shape, dtype=wide, device=device) for _ in net.layer_ids]

    def build(self, common: CommonAttentionMetadata) -> GDNAttentionMetadata:
        return GDNAttentionMetadata.build(common, self.num_states)

    def run(self, layer: GDNLayer, qkv: Tensor, a: Tensor, b: Tensor, metadata: GDNAttentionMetadata) -> Tensor:
        """[num_tokens, v_heads, v_dim]; zero for dead tokens."""
        requests = (metadata.slots, metadata.starts, metadata.counts, metadata.positions)
        mixed = causal_conv(qkv, layer.conv_weight, None, self.inputs[layer.idx], *requests, metadata.max_count)
        arrays = (mixed, a, b, layer.a_log, layer.dt_bias, self.states[layer.idx], *requests)
        if metadata.in_chunks:
            return chunked_delta_rule(*arrays)
        return recurrent_delta_rule(*arrays, metadata.max_count)


@dataclass(slots=True)
class Recurrence:
    """A step's work of this kind. Its metadata is made by the first layer, so that whatever records it records that."""

    backend: GDNBackend
    common: CommonAttentionMetadata
    _metadata: GDNAttentionMetadata | None = None

    @property
    def metadata(self) -> GDNAttentionMetadata:
        self.prepare()
        assert self._metadata is not None
        return self._metadata

    def prepare(self) -> None:
        if self._metadata is None:
            self._metadata = self.backend.build(self.common)

    def run(self, layer: GDNLayer, qkv: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return self.backend.run(layer, qkv, a, b, self.metadata)
