"""Dense decoder layers as five launches each, for steps of few tokens on a GPU: see ``kernels/fused_linear``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from slipstream.attention.context import AttentionContext
from slipstream.attention.grouped_query import GroupedQueryStep
from slipstream.config import ModelConfig
from slipstream.kernels.linear.fused_linear import add_scaled, embed_scaled, scale_tokens
from slipstream.kernels.linear.small_linear import Epilogue, Scaled
from slipstream.kernels.tuning.tiles import Kind, Weight, max_fused_tokens
from slipstream.kernels.tuning.tiles import Weight as TileKey
from slipstream.models.layers import Attention, Embedding, FeedForward, Linear, Reduction, RMSNorm


class FusedLayer(NamedTuple):
    """The parts of a layer, in execution order."""

    before: RMSNorm | None  # None where the input of attention is not the norm of the stream
    attention: Attention
    between: RMSNorm
    mlp: FeedForward


class FusedLayers(NamedTuple):
    layers: list[FusedLayer]
    max_tokens: int

    def prepare(self, context: AttentionContext, cos_sin: Iterable[Tensor], dtype: torch.dtype) -> None:
        """What all layers share, computed before the first product, so that nothing is launched between two layers."""
        prepare_attention(context, [layer.attention for layer in self.layers], cos_sin, dtype)

    def forward(
        self, embed: Embedding, input_ids: Tensor, context: AttentionContext, cos_sin: Sequence[Tensor]
    ) -> Tensor:
        """The residual stream after the last layer: [num_tokens, hidden]."""
        before = self.layers[0].before
        assert before is not None
        if embed.scale != 1.0 or (table := embed.dense) is None:
            return self.forward_embedded(embed(input_ids), context, cos_sin)
        self.prepare(context, cos_sin, before.weight.dtype)
        x, *scaled = embed_scaled(table, input_ids, before.weight)
        context.tap(0, x)
        return self.forward_scaled(Stream(x, (scaled[0], scaled[1])), context, cos_sin)

    def forward_embedded(self, x: Tensor, context: AttentionContext, cos_sin: Sequence[Tensor]) -> Tensor:
        """As ``forward``, from the tokens' embeddings."""
        before = self.layers[0].before
        assert before is not None
        self.prepare(context, cos_sin, before.weight.dtype)
        context.tap(0, x)
        return self.forward_scaled(Stream(x, scale_tokens(x, before.weight)), context, cos_sin)

    def forward_scaled(self, stream: Stream, context: AttentionContext, cos_sin: Sequence[Tensor]) -> Tensor:
        """As ``forward``, for a stream that is already scaled for the first norm."""
        return self._after_projection(_project(self.layers[0], stream), stream.x, context, cos_sin)

    def forward_from(self, source: Tensor, x: Tensor, context: AttentionContext, cos_sin: Sequence[Tensor]) -> Tensor:
        """As ``forward``, where the input of the first attention is ``source`` and not the norm of the stream."""
        return self._after_projection(project_few(self.layers[0].attention.qkv_proj, source), x, context, cos_sin)

    def _after_projection(self, qkv: Tensor, x: Tensor, context: AttentionContext, cos_sin: Sequence[Tensor]) -> Tensor:
        """Everything after the first projection."""
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
    """The residual stream between two products, with the scales of the next norm; None after the last layer."""

    x: Tensor  # [num_tokens, hidden]
    scaled: tuple[Tensor, Tensor] | None  # from scale_tokens


def layer_weights(config: ModelConfig, width: int) -> tuple[Weight, ...]:
    """The products of a dense layer, in execution order."""
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
        step.places.of(table, dtype)


def fuse(layers: Iterable[nn.Module], max_tokens: int | None = None) -> FusedLayers | None:
    """The layers, if they are dense and have equal formats; None where fusing them is never faster.

    ``max_tokens`` says for how many tokens they are used; by default for as many as they are faster for.
    """
    return fuse_parts([layer_parts(layer) for layer in layers], max_tokens=max_tokens)


def layer_parts(layer: nn.Module, normed: bool = True) -> FusedLayer | None:
    """None where the layer is not dense. Without ``normed`` the input of attention is not the norm of the stream."""
    before = layer.input_layernorm if normed else None
    attention, between, mlp = layer.self_attn, layer.post_attention_layernorm, layer.mlp
    if not isinstance(mlp, FeedForward):
        return None
    assert isinstance(before, RMSNorm | None)
    assert isinstance(attention, Attention)
    assert isinstance(between, RMSNorm)
    return FusedLayer(before, attention, between, mlp)


def fuse_parts(
    found: Sequence[FusedLayer | None], mixing: Linear | None = None, max_tokens: int | None = None
) -> FusedLayers | None:
    """``mixing`` is a product that always precedes the first layer."""
    layers = [layer for layer in found if layer is not None]
    if len(layers) < len(found):
        return None
    keys = [*_tile_keys(layers[0]), *([] if mixing is None else [mixing.matrix.tile_key("plain")])]
    usable = [key for key in keys if key is not None]
    if len(usable) < len(keys) or any(_tile_keys(layer)[1:] != keys[1:4] for layer in layers):
        return None  # a matrix in another layout, or layers of several formats
    if max_tokens is None:
        max_tokens = max_fused_tokens(layers[0].between.weight, usable)
    return FusedLayers(layers, max_tokens) if max_tokens else None


def _tile_keys(layer: FusedLayer) -> list[TileKey | None]:
    """The keys of the layer's products, in execution order; see ``layer_weights``."""
    attention, mlp = layer.attention, layer.mlp
    first: Kind = "plain" if layer.before is None else "norm"
    products: list[tuple[Linear, Kind]] = [
        (attention.qkv_proj, first),
        (attention.o_proj, "add"),
        (mlp.gate_up_proj, "gated"),
        (mlp.down_proj, "add"),
    ]
    return [linear.matrix.tile_key(kind) for linear, kind in products]


def _project(layer: FusedLayer, stream: Stream) -> Tensor:
    assert layer.before is not None
    assert stream.scaled is not None
    qkv = layer.attention.qkv_proj
    return qkv.matrix.project_few(Scaled(*stream.scaled, layer.before.eps), Epilogue(qkv.bias)).out


def _finish(
    layer: FusedLayer, qkv: Tensor, x: Tensor, following: RMSNorm | None, context: AttentionContext, cos_sin: Tensor
) -> Stream:
    """Everything of a layer after its projection, and the norm that follows."""
    _, attention, between, mlp = layer
    stream = _add(attention.mix(qkv, context, cos_sin), attention.o_proj, x, between)
    assert stream.scaled is not None
    gate_up = mlp.gate_up_proj
    end = Epilogue(gate_up.bias, activation=mlp.activation)
    gated = gate_up.matrix.project_few(Scaled(*stream.scaled, between.eps), end).out
    return _add(gated, mlp.down_proj, stream.x, following)


def _add(x: Tensor, linear: Linear, residual: Tensor, norm: RMSNorm | None) -> Stream:
    """The residual stream with the product added, and the scales of the next norm."""
    if linear.reduction is not None:
        return _add_reduced(linear.reduction, x, linear, residual, norm)
    gain = None if norm is None else norm.weight
    out, scaled, squares = linear.matrix.project_few(x, Epilogue(linear.bias, residual, gain))
    return Stream(out, None if scaled is None or squares is None else (scaled, squares))


def _add_reduced(reduction: Reduction, x: Tensor, linear: Linear, residual: Tensor, norm: RMSNorm | None) -> Stream:
    """The same where several devices hold the weight: their results must be reduced before they are added."""
    total = reduction(linear.matrix.project_few(x, Epilogue()).out)
    if linear.bias is not None:
        total = total + linear.bias
    if norm is None:
        return Stream(total + residual, None)
    out, *scaled = add_scaled(total, residual, norm.weight)
    return Stream(out, (scaled[0], scaled[1]))


def project_few(linear: Linear, x: Tensor) -> Tensor:
    """The product of few tokens, with nothing fused to it."""
    if linear.matrix.tile_key("plain") is None or linear.reduction is not None:
        out: Tensor = linear(x)
        return out
    return linear.matrix.project_few(x, Epilogue(linear.bias)).out
