"""Multi-head latent attention in place of grouped-query attention: low-rank products around ``attention/mla.py``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slipstream.attention.context import AttentionContext
from slipstream.attention.mla import LatentInputs, LatentLayer, LatentSpec, LatentStep
from slipstream.config import ModelConfig
from slipstream.models.layers import Layer, Linear, RMSNorm

_EPS = 1e-6  # of the norms inside attention, whatever the config says of the others


class LatentAttention(Layer):
    def __init__(self, config: ModelConfig, idx: int) -> None:
        super().__init__()
        spec = config.cache_specs[idx]
        assert isinstance(spec, LatentSpec)
        self.idx, self.spec, self.scale = idx, spec, config.attention_scale
        heads, hidden, bias = spec.num_heads, config.hidden_size, config.qkv_bias
        query_size = heads * (spec.nope_dim + spec.rope_dim)
        # Both products of a token's hidden state are one.
        first = {"q_a_proj": spec.query_rank} if spec.query_rank else {"q_proj": query_size}
        parts = {**first, "kv_a_proj_with_mqa": spec.latent_dim + spec.rope_dim}
        self.sizes = list(parts.values())
        self.down_proj = Linear(hidden, parts, bias)
        self.q_a_layernorm = RMSNorm(spec.query_rank, _EPS) if spec.query_rank else None
        self.q_b_proj = Linear(spec.query_rank, {"q_b_proj": query_size}) if spec.query_rank else None
        self.kv_a_layernorm = RMSNorm(spec.latent_dim, _EPS)
        self.kv_b_proj = Linear(spec.latent_dim, {"kv_b_proj": heads * (spec.nope_dim + spec.value_dim)})
        self.o_proj = Linear(heads * spec.value_dim, {"o_proj": hidden}, config.output_bias)
        # The two halves of ``kv_b_proj``, by head, as queries and results are multiplied with them.
        self.to_keys: nn.Parameter | None = None
        self.to_values: nn.Parameter | None = None

    def forward(self, x: Tensor, context: AttentionContext, cos_sin: Tensor) -> Tensor:
        rank, latents = torch.split(self.down_proj(x), self.sizes, dim=1)
        if self.q_a_layernorm is not None:
            rank = self.q_a_layernorm(rank)
        q = rank if self.q_b_proj is None else self.q_b_proj(rank)
        q = q.view(x.shape[0], self.spec.num_heads, -1)
        mixed = context.run(self.layer, self.make_inputs(x, rank, LatentInputs(q, latents, cos_sin)))
        out: Tensor = self.o_proj(mixed.flatten(1))
        return out

    def make_inputs(self, x: Tensor, rank: Tensor | None, inputs: LatentInputs) -> LatentInputs:
        """What the layer's backend is given. ``rank`` is what queries are made of, None where none are needed."""
        return inputs

    def store(self, x: Tensor, context: AttentionContext, cos_sin: Tensor, few: bool) -> None:
        """Write the latents of the tokens to the cache, and nothing else."""
        _, latents = torch.split(self.down_proj(x), self.sizes, dim=1)
        none = latents.new_empty(x.shape[0], 0, self.spec.nope_dim + self.spec.rope_dim)
        step: LatentStep = context.at(self.layer)
        step.store(self.layer, self.make_inputs(x, None, LatentInputs(none, latents, cos_sin)))

    @property
    def layer(self) -> LatentLayer:
        assert self.to_keys is not None and self.to_values is not None, "the weights are not finished"
        norm, up, scale = self.kv_a_layernorm, self.kv_b_proj, self.scale
        assert scale is not None
        return LatentLayer(self.idx, norm.weight, norm.eps, self.to_keys, self.to_values, up, scale)

    def finish_weights(self, device: torch.device) -> None:
        """Split the matrix that makes keys and values of a latent. Prompts multiply with it as a whole."""
        self.kv_b_proj.finish_weights(device)
        spec, like = self.spec, self.kv_a_layernorm.weight
        rows = (spec.num_heads, spec.nope_dim + spec.value_dim, spec.latent_dim)
        # Without memory the layer is only measured.
        whole = like.new_empty(rows) if like.is_meta else self.kv_b_proj.matrix.dequantised().to(like.dtype).view(rows)
        keys, values = whole[:, : spec.nope_dim], whole[:, spec.nope_dim :].transpose(1, 2)
        self.to_keys = nn.Parameter(keys.contiguous(), requires_grad=False)
        self.to_values = nn.Parameter(values.contiguous(), requires_grad=False)
