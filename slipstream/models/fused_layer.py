"""Dense decoder layers as five launches each, for steps of few tokens on a GPU: see ``kernels/fused_linear``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor, nn

from slipstream.attention.backend import AttentionContext
from slipstream.config import ModelConfig
from slipstream.kernels.fused_linear import linear_add, linear_add_scaled, scale_tokens, scaled_gated, scaled_linear
from slipstream.kernels.tiles import Weight, max_fused_tokens
from slipstream.models.layers import Attention, FeedForward, Linear, RMSNorm


class FusedLayer(NamedTuple):
    """The parts of a layer, in the order they run."""

    before: RMSNorm
    attention: Attention
    between: RMSNorm
    mlp: FeedForward


class FusedLayers(NamedTuple):
    layers: list[FusedLayer]
    max_tokens: int

    def forward(self, x: Tensor, context: AttentionContext, cos_sin: list[Tensor]) -> Tensor:
        """The residual stream behind the last layer: [num_tokens, hidden]."""
        stream = Stream(x, scale_tokens(x, self.layers[0].before.weight))
        for idx, layer in enumerate(self.layers):
            context.tap(idx, stream.x)
            following = self.layers[idx + 1].before if idx + 1 < len(self.layers) else None
            stream = _run(layer, stream, following, context, cos_sin[idx])
        context.tap(len(self.layers), stream.x)
        return stream.x


class Stream(NamedTuple):
    """The residual stream between two products, and what the next norm needs of it; None behind the last layer."""

    x: Tensor  # [num_tokens, hidden]
    scaled: tuple[Tensor, Tensor] | None  # from scale_tokens


def layer_weights(config: ModelConfig, width: int) -> tuple[Weight, ...]:
    """The products of a dense layer, in the order they run."""
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    qkv = heads + 2 * config.num_kv_heads * config.head_dim
    return (
        Weight("norm", qkv, hidden, width),
        Weight("add", hidden, heads, width),
        Weight("gated", config.intermediate_size, hidden, width),
        Weight("add", hidden, config.intermediate_size, width),
    )


def fuse(layers: Iterable[nn.Module], config: ModelConfig) -> FusedLayers | None:
    """The layers, if they are dense and their weights as stored; None where no step would gain by it."""
    found = []
    for layer in layers:
        parts = (layer.input_layernorm, layer.self_attn, layer.post_attention_layernorm, layer.mlp)
        before, attention, between, mlp = parts
        if not isinstance(mlp, FeedForward) or mlp.gated is not None:
            return None
        assert isinstance(before, RMSNorm)
        assert isinstance(attention, Attention)
        assert isinstance(between, RMSNorm)
        found.append(FusedLayer(before, attention, between, mlp))
    like = found[0].before.weight
    max_tokens = max_fused_tokens(like, layer_weights(config, like.element_size()))
    return FusedLayers(found, max_tokens) if max_tokens else None


def _run(
    layer: FusedLayer, stream: Stream, following: RMSNorm | None, context: AttentionContext, cos_sin: Tensor
) -> Stream:
    before, attention, between, mlp = layer
    assert stream.scaled is not None
    qkv = scaled_linear(*stream.scaled, before.eps, _matrix(attention.qkv_proj), attention.qkv_proj.bias)
    stream = _add(attention.mix(qkv, context, cos_sin), attention.o_proj, stream.x, between)
    assert stream.scaled is not None
    gate_up = mlp.gate_up_proj
    gated = scaled_gated(*stream.scaled, between.eps, _matrix(gate_up), gate_up.bias, mlp.activation)
    return _add(gated, mlp.down_proj, stream.x, following)


def _add(x: Tensor, linear: Linear, residual: Tensor, norm: RMSNorm | None) -> Stream:
    if norm is None:
        return Stream(linear_add(x, _matrix(linear), linear.bias, residual), None)
    out, scaled, squares = linear_add_scaled(x, _matrix(linear), linear.bias, residual, norm.weight)
    return Stream(out, (scaled, squares))


def _matrix(linear: Linear) -> Tensor:
    weight = linear.matrix
    assert isinstance(weight, Tensor)
    return weight
