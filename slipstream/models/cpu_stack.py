"""Whether a decoder's layers can run as one operation on a CPU, and their weights in the order that it takes them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from slipstream.config import ModelConfig
from slipstream.kernels.linear.quant_linear import default_planes
from slipstream.kernels.native.decoder_stack import DecoderStack, StackLayer
from slipstream.models.layers import Attention, FeedForward, RMSNorm


def stack_of(config: ModelConfig, layers: Iterable[nn.Module]) -> DecoderStack | None:
    """The stack of packed layers, or None if one of them is not dense, gated by silu and in panels."""
    if config.window_rope is not None:
        return None
    found: list[StackLayer] = []
    for layer in layers:
        if (one := _stack_layer(layer)) is None:
            return None
        found.append(one)
        attention = layer.self_attn
    assert isinstance(attention, Attention)
    shape = attention.layer
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    return DecoderStack(found, config.hidden_size, *heads, config.rms_norm_eps, shape.scale, default_planes())


def _stack_layer(layer: nn.Module) -> StackLayer | None:
    attention, mlp = layer.self_attn, layer.mlp
    before, after = layer.input_layernorm, layer.post_attention_layernorm
    assert isinstance(attention, Attention)
    assert isinstance(before, RMSNorm)
    assert isinstance(after, RMSNorm)
    if not isinstance(mlp, FeedForward) or mlp.down_proj.bias is not None:
        return None
    products = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    found = [matrix for linear in products if (matrix := linear.matrix.stack_matrix()) is not None]
    if len(found) < len(products) or any(linear.reduction is not None for linear in products):
        return None
    qkv, o, gate_up, down = found
    if not gate_up.gated:
        return None
    return StackLayer(
        input_norm=before.weight,
        qkv=qkv,
        qkv_bias=attention.qkv_proj.bias,
        q_norm=None if attention.q_norm is None else attention.q_norm.weight,
        k_norm=None if attention.k_norm is None else attention.k_norm.weight,
        o=o,
        o_bias=attention.o_proj.bias,
        post_norm=after.weight,
        gate_up=gate_up,
        down=down,
        window=attention.layer.window,
    )
