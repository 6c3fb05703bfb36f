"""Qwen3-MoE: Qwen3 with experts in most layers."""

from __future__ import annotations

from typing import Any

from slipstream.checkpoints.hf_config import read_decoder_config, read_expert_layers, read_experts, require, same_window
from slipstream.config import ModelConfig
from slipstream.fields import Fields
from slipstream.models.decoder import Decoder


class Qwen3Moe(Decoder):
    @staticmethod
    def read_config(hf: dict[str, Any]) -> ModelConfig:
        fields = Fields.from_dict(hf)
        bias, renormalise = fields.flag("attention_bias"), fields.flag("norm_topk_prob")
        size = require(fields, "moe_intermediate_size")
        return read_decoder_config(
            fields,
            qk_norm=True,
            qkv_bias=bias,
            output_bias=bias,
            windows=same_window(fields) if fields.flag("use_sliding_window") else (),
            experts=read_experts(fields, size, read_expert_layers(fields), renormalise=renormalise),
        )
