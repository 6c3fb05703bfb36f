"""Dense decoder layers as five launches each, for steps of few tokens on a GPU: see ``kernels/fused_linear``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from slipstream.attention.context import AttentionContext
from slipstream.attention.grouped_query import GroupedQueryStep
from slipstream.config import ModelConfig
from slipstream.kernels.fused_linear import (
    embed_scaled,
    linear_add,
    linear_add_scaled,
    linear_few,
    scale_tokens,
    scaled_gated,
    scaled_linear,
)
from slipstream.kernels.tiles import Weight, max_fused_tokens
from slipstream.models.layers import Attention, Embedding, FeedForward, Linear, RMSNorm


class FusedLayer(NamedTuple):
    """The parts of a layer, in the order they run."""

    before: RMSNorm | None  # none where it attends from something else
    attention: Attention
    between: RMSNorm
    mlp: FeedForward


class FusedLayers(NamedTuple):
    layers: list[FusedLayer]
    max_tokens: int

    def prepare(self, context: AttentionContext, cos_sin: Iterable[Tensor], dtype: torch.dtype) -> None:
        """What all layers share, before the first product: nothing of it is to be launched between two."""
        prepare_attention(context, [layer.attention for layer in self.layers], cos_sin, dtype)

    def forward(
        self, embed: Embedding, input_ids: Tensor, context: AttentionContext, cos_sin: Sequence[Tensor]
    ) -> Tensor:
        """The residual stream behind the last layer: [num_tokens, hidden]."""
        before = self.layers[0].before
        assert before is not None
        self.prepare(context, cos_sin, embed.weight.dtype)
        if embed.scale == 1.0:
            x, *scaled = embed_scaled(embed.weight, input_ids, before.weight)
            stream = Stream(x, (scaled[0], scaled[1]))
        else:
            x = embed(input_ids)
            stream = Stream(x, scale_tokens(x, before.weight))
        context.tap(0, x)
        return self.forward_scaled(stream, context, cos_sin)

    def forward_scaled(self, stream: Stream, context: AttentionContext, cos_sin: Sequence[Tensor]) -> Tensor:
        """The same, where whatever made the stream has seen to the first norm."""
        return self._behind(_project(self.layers[0], stream), stream.x, context, cos_sin)

    def forward_from(self, source: Tensor, x: Tensor, context: AttentionContext, cos_sin: Sequence[Tensor]) -> Tensor:
        """The same, where the first layer attends from another source than the norm of the stream."""
        qkv = self.layers[0].attention.qkv_proj
        return self._behind(linear_few(source, stored(qkv), qkv.bias), x, context, cos_sin)

    def _behind(self, qkv: Tensor, x: Tensor, context: AttentionContext, cos_sin: Sequence[Tensor]) -> Tensor:
        """All that is behind the first projection."""
        num_layers = len(self.layers)
        for idx, layer in enumerate(self.layers):
            following = self.layers[idx + 1] if idx + 1 < num_layers else None
            stream = _finish(layer, qkv, x, None if following is None else following.before, context, cos_sin[idx])
            x = stream.x
            context.tap(idx + 1, x)
            if following is not None:
                qkv = _project(following, stream)
        return x


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


def prepare_attention(
    context: AttentionContext, layers: Iterable[Attention], cos_sin: Iterable[Tensor], dtype: torch.dtype
) -> None:
    for attention, table in zip(layers, cos_sin, strict=True):
        step: GroupedQueryStep = context.at(attention.layer)
        step.rotation(table, dtype)


def fuse(layers: Iterable[nn.Module], config: ModelConfig) -> FusedLayers | None:
    """The layers, if they are dense and their weights as stored; None where no step would gain by it."""
    found = [layer_parts(layer) for layer in layers]
    width = next(nn.ModuleList(layers).parameters()).element_size()
    return fuse_parts(found, layer_weights(config, width))


def layer_parts(layer: nn.Module, normed: bool = True) -> FusedLayer | None:
    """None where the layer is not dense, or its weights are in another layout.

    Without ``normed`` it does not attend from the norm of the stream.
    """
    before = layer.input_layernorm if normed else None
    attention, between, mlp = layer.self_attn, layer.post_attention_layernorm, layer.mlp
    if not isinstance(mlp, FeedForward) or mlp.gated is not None:
        return None
    assert isinstance(before, RMSNorm | None)
    assert isinstance(attention, Attention)
    assert isinstance(between, RMSNorm)
    return FusedLayer(before, attention, between, mlp)


def fuse_parts(found: Sequence[FusedLayer | None], weights: Iterable[Weight]) -> FusedLayers | None:
    """``weights`` are those of one layer, and of what always stands before it."""
    layers = [layer for layer in found if layer is not None]
    if len(layers) < len(found):
        return None
    max_tokens = max_fused_tokens(layers[0].between.weight, weights)
    return FusedLayers(layers, max_tokens) if max_tokens else None


def _project(layer: FusedLayer, stream: Stream) -> Tensor:
    assert layer.before is not None
    assert stream.scaled is not None
    qkv = layer.attention.qkv_proj
    return scaled_linear(*stream.scaled, layer.before.eps, stored(qkv), qkv.bias)


def _finish(
    layer: FusedLayer, qkv: Tensor, x: Tensor, following: RMSNorm | None, context: AttentionContext, cos_sin: Tensor
) -> Stream:
    """All of a layer that is behind its projection, and the norm that follows."""
    _, attention, between, mlp = layer
    stream = _add(attention.mix(qkv, context, cos_sin), attention.o_proj, x, between)
    assert stream.scaled is not None
    gate_up = mlp.gate_up_proj
    gated = scaled_gated(*stream.scaled, between.eps, stored(gate_up), gate_up.bias, mlp.activation)
    return _add(gated, mlp.down_proj, stream.x, following)


def _add(x: Tensor, linear: Linear, residual: Tensor, norm: RMSNorm | None) -> Stream:
    if norm is None:
        return Stream(linear_add(x, stored(linear), linear.bias, residual), None)
    out, scaled, squares = linear_add_scaled(x, stored(linear), linear.bias, residual, norm.weight)
    return Stream(out, (scaled, squares))


def stored(linear: Linear) -> Tensor:
    """The weight of a layer that is fused."""
    weight = linear.matrix
    assert isinstance(weight, Tensor)
    return weight
