"""Latent attention with an indexer beside it, which chooses the keys: see ``attention/sparse_mla.py``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.attention.mla import LatentInputs
from slipstream.attention.sparse_mla import SparseLatentInputs, SparseLatentLayer, SparseLatentSpec
from slipstream.config import ModelConfig
from slipstream.models.latent_attention import LatentAttention
from slipstream.models.layers import Layer, Linear
from slipstream.weights.matrix import Slot


class Indexer(Layer):
    """The products that make its queries, its keys and the weights of its heads."""

    def __init__(self, config: ModelConfig, spec: SparseLatentSpec) -> None:
        super().__init__()
        self.spec = spec
        self.queries = Linear(spec.query_rank, {"wq_b": spec.index_heads * spec.index_dim})
        self.keys = Linear(config.hidden_size, {"wk": spec.index_dim})
        # Apart from the keys' product: checkpoints quantise that one and not this.
        self.weights = Linear(config.hidden_size, {"weights_proj": spec.index_heads})
        self.key_gain = nn.Parameter(torch.empty(spec.index_dim), requires_grad=False)
        self.key_bias = nn.Parameter(torch.empty(spec.index_dim), requires_grad=False)

    def forward(self, x: Tensor, rank: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and weights of heads; without ``rank`` of no heads."""
        spec, num_tokens = self.spec, x.shape[0]
        if rank is None:
            return x.new_empty(num_tokens, 0, spec.index_dim), self.keys(x), x.new_empty(num_tokens, 0)
        q = self.queries(rank).view(num_tokens, spec.index_heads, spec.index_dim)
        weights = self.weights(x)
        wide = torch.promote_types(weights.dtype, torch.float32)
        return q, self.keys(x), weights.to(wide) * spec.index_heads**-0.5

    def own_slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        yield f"{name}.k_norm.weight", self.key_gain
        yield f"{name}.k_norm.bias", self.key_bias


class SparseLatentAttention(LatentAttention):
    def __init__(self, config: ModelConfig, idx: int) -> None:
        super().__init__(config, idx)
        assert isinstance(self.spec, SparseLatentSpec)
        self.indexer = Indexer(config, self.spec)

    def make_inputs(self, x: Tensor, rank: Tensor | None, inputs: LatentInputs) -> Any:
        return SparseLatentInputs(*inputs, *self.indexer(x, rank))

    @property
    def layer(self) -> Any:
        return SparseLatentLayer(*super().layer, self.indexer.key_gain, self.indexer.key_bias)
