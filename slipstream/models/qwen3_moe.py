"""Qwen3-MoE: Qwen3 with experts in most layers."""

from __future__ import annotations

from typing import Any

from slipstream.config import ModelConfig
from slipstream.models.decoder import Decoder
from slipstream.models.hf_config import read_decoder_config, read_experts, require, same_window


class Qwen3Moe(Decoder):
    @staticmethod
    def read_config(hf: dict[str, Any]) -> ModelConfig:
        bias = bool(hf.get("attention_bias", False))
        step, dense = hf.get("decoder_sparse_step") or 1, hf.get("mlp_only_layers") or ()
        layer_ids = [i for i in range(require(hf, "num_hidden_layers")) if i not in dense and (i + 1) % step == 0]
        renormalise = bool(hf.get("norm_topk_prob", False))
        return read_decoder_config(
            hf,
            qk_norm=True,
            qkv_bias=bias,
            output_bias=bias,
            windows=same_window(hf) if hf.get("use_sliding_window") else (),
            experts=read_experts(hf, require(hf, "moe_intermediate_size"), renormalise, layer_ids),
        )
