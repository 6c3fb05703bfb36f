"""Gemma 3, the text models: norms around every part, a gelu gate, most layers with a window and a rope of their own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from slipstream.attention.context import AttentionContext
from slipstream.checkpoints.hf_config import MAX_LAYERS, layer_windows, read_decoder_config, read_rope, require
from slipstream.config import ModelConfig
from slipstream.errors import ModelError
from slipstream.fields import Fields
from slipstream.models.decoder import Decoder, DecoderLayer
from slipstream.models.layers import RMSNorm

# Values that Gemma's configs leave out because they never differ.
_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
}


class Gemma3Layer(DecoderLayer):
    """Attention and feed-forward are normed on their way in and on their way out."""

    def __init__(self, config: ModelConfig, idx: int) -> None:
        super().__init__(config, idx)
        self.pre_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, hidden: Tensor, residual: Tensor | None, context: AttentionContext, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            hidden, residual = self.input_layernorm(hidden), hidden
        else:
            hidden, residual = self.input_layernorm.add(hidden, residual)
        hidden = self.post_attention_layernorm(self.self_attn(hidden, context, cos_sin))
        hidden, residual = self.pre_feedforward_layernorm.add(hidden, residual)
        return self.post_feedforward_layernorm(self.mlp(hidden)), residual


class Gemma3(Decoder):
    layer_class = Gemma3Layer

    @staticmethod
    def read_config(hf: dict[str, Any]) -> ModelConfig:
        fields = Fields.from_dict(hf).with_defaults(_DEFAULTS)
        for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
            if fields.get(key):
                raise ModelError(f"{fields.source} turns on {key}, which is not supported")
        full, local = _ropes(fields)
        bias, pattern = fields.flag("attention_bias"), fields.integer("sliding_window_pattern", high=MAX_LAYERS)
        return read_decoder_config(
            full.changed(hidden_act=fields.text("hidden_activation")),
            qk_norm=True,
            qkv_bias=bias,
            output_bias=bias,
            embedding_scale=float(require(fields, "hidden_size")) ** 0.5,
            attention_scale=fields.number("query_pre_attn_scalar", above=0.0) ** -0.5,
            windows=layer_windows(fields, lambda idx: (idx + 1) % pattern != 0),
            window_rope=read_rope(local, require(fields, "head_dim"), require(fields, "max_position_embeddings")),
        )

    def translate(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        if "norm" not in name:
            return [(name, tensor)]
        # Checkpoints store norm weights minus one. Adding one in 16 bits would round once too often.
        return [(name, tensor.to(torch.promote_types(tensor.dtype, torch.float32)) + 1)]


def _ropes(fields: Fields) -> tuple[Fields, Fields]:
    """The rope settings for layers with full attention, and for those with a window."""
    nested = fields.section("rope_parameters")
    full, local = nested, None
    if "full_attention" in nested:
        full, local = nested.section("full_attention"), nested.section("sliding_attention")
    # The scaling of older configs applies to layers with full attention.
    theta = fields.number("rope_local_base_freq", above=1.0)
    windowed = fields.changed(rope_parameters=local, rope_scaling=None, rope_theta=theta)
    return fields.changed(rope_parameters=full), windowed
