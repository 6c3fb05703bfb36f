"""The parts decoders are made of. Each knows the names its weights have in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.attention.backend import AttentionLayer, HeadNorms
from slipstream.attention.context import AttentionContext
from slipstream.attention.grouped_query import GroupedQueryStep, NewHeads
from slipstream.config import ModelConfig
from slipstream.kernels.fused_linear import linear_few
from slipstream.kernels.geglu import geglu
from slipstream.kernels.linear import PackedWeight, Weight, embedding, linear, pack, pack_gated, project
from slipstream.kernels.rms_norm import add_rms_norm, rms_norm
from slipstream.kernels.scaled_embedding import scaled_embedding
from slipstream.kernels.swiglu import swiglu


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)


class Layer(nn.Module):
    """A module without hooks: a call is its forward pass. torch's own call costs more than a small kernel."""

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)


class Linear(Layer):
    """A matrix product with one stored weight, which may stack several of the checkpoint's: ``{"q_proj": 64, ...}``.

    Stacked weights turn three small products into one.
    """

    def __init__(self, in_size: int, parts: dict[str, int], bias: bool = False) -> None:
        super().__init__()
        self.parts = parts
        self.weight = _weight(sum(parts.values()), in_size)
        self.bias = _weight(sum(parts.values())) if bias else None
        self.packed: Weight | None = None

    def forward(self, x: Tensor) -> Tensor:
        return project(x, self.matrix, self.bias)

    @property
    def matrix(self) -> Weight:
        """The weight in the layout it is kept in."""
        return self.weight if self.packed is None else self.packed

    def pack(self) -> None:
        """After loading: bring the weight into the layout that multiplies fastest here. The original is dropped."""
        self.packed = pack(self.weight.data)
        if self.packed is not self.weight.data:
            del self.weight

    def slots(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names beside the memory their values go to."""
        start = 0
        for part, size in self.parts.items():
            yield f"{prefix}{part}.weight", self.weight[start : start + size]
            if self.bias is not None:
                yield f"{prefix}{part}.bias", self.bias[start : start + size]
            start += size


class RMSNorm(Layer):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = _weight(size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and the sum itself as the next residual."""
        return add_rms_norm(x, residual, self.weight, self.eps)


class Embedding(Layer):
    def __init__(self, vocab_size: int, size: int, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = _weight(vocab_size, size)
        self.scale = scale

    def forward(self, token_ids: Tensor) -> Tensor:
        if self.scale == 1.0:
            return embedding(self.weight, token_ids)
        return scaled_embedding(self.weight, token_ids, self.scale)


class Attention(Layer):
    """Grouped-query attention with rotary positions, and norms on queries and keys where the model has them."""

    def __init__(self, config: ModelConfig, idx: int) -> None:
        super().__init__()
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        scale = head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        self.layer = AttentionLayer(idx, heads, kv_heads, head_dim, scale, config.window(idx))
        parts = {"q_proj": heads * head_dim, "k_proj": kv_heads * head_dim, "v_proj": kv_heads * head_dim}
        self.has_gate = config.attention_gate
        if self.has_gate:
            parts["q_proj_gate"] = heads * head_dim
        self.qkv_proj = Linear(config.hidden_size, parts, config.qkv_bias)
        self.o_proj = Linear(heads * head_dim, {"o_proj": config.hidden_size}, config.output_bias)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, context: AttentionContext, cos_sin: Tensor) -> Tensor:
        mixed: Tensor = self.o_proj(self.mix(self.qkv_proj(x), context, cos_sin))
        return mixed

    def mix(self, qkv: Tensor, context: AttentionContext, cos_sin: Tensor) -> Tensor:
        """What lies between the two products: [num_tokens, all heads] -> [num_tokens, query heads]."""
        q, k, v, *gate = self._heads(qkv)
        mixed = context.run(self.layer, NewHeads(q, k, v, cos_sin, self._norms()))
        return (mixed * torch.sigmoid(gate[0]) if gate else mixed).flatten(1)

    def store(self, x: Tensor, context: AttentionContext, cos_sin: Tensor, few: bool) -> None:
        """Keys and values of the tokens go to the cache, and that is all. Of ``few`` tokens by another kernel."""
        qkv, layer = self.qkv_proj, self.layer
        if isinstance(weight := qkv.matrix, Tensor):
            rows = slice(layer.num_heads * layer.head_dim, (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim)
            bias = None if qkv.bias is None else qkv.bias[rows]
            made = (linear_few if few else linear)(x, weight[rows], bias)
            k, v = made.view(made.shape[0], -1, layer.head_dim).chunk(2, dim=1)
        else:  # packed for a CPU, where the whole product costs little
            _, k, v, *_ = self._heads(qkv(x))
        step: GroupedQueryStep = context.at(layer)
        step.store(layer, k, v, cos_sin, self._norms())

    def _heads(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys, values and, where there are any, gates: [num_tokens, heads, head_dim] each."""
        layer = self.layer
        counts = [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads, *[layer.num_heads] * self.has_gate]
        return torch.split(qkv.view(qkv.shape[0], -1, layer.head_dim), counts, dim=1)

    def _norms(self) -> HeadNorms | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)


class FeedForward(Layer):
    """The gated feed-forward layer of Llama and its relatives."""

    def __init__(self, config: ModelConfig, size: int | None = None) -> None:
        super().__init__()
        size = config.intermediate_size if size is None else size
        self.gate_up_proj = Linear(config.hidden_size, {"gate_proj": size, "up_proj": size}, config.mlp_bias)
        self.down_proj = Linear(size, {"down_proj": config.hidden_size}, config.mlp_bias)
        self.activation = config.activation
        self.activate = {"silu": swiglu, "gelu_tanh": geglu}[config.activation]
        self.gated: PackedWeight | None = None  # the product and its activation in one, where that can be had

    def forward(self, x: Tensor) -> Tensor:
        gated = self.activate(self.gate_up_proj(x)) if self.gated is None else project(x, self.gated, None)
        out: Tensor = self.down_proj(gated)
        return out

    def pack(self) -> None:
        self.down_proj.pack()
        if self.activate is swiglu and self.gate_up_proj.bias is None:
            self.gated = pack_gated(self.gate_up_proj.weight.data)
        if self.gated is None:
            self.gate_up_proj.pack()
        else:
            del self.gate_up_proj
