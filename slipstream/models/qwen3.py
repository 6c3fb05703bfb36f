"""Qwen3: Llama with RMS norms on each head's queries and keys."""

from __future__ import annotations

from typing import Any

from slipstream.checkpoints.hf_config import read_decoder_config
from slipstream.config import ModelConfig
from slipstream.fields import Fields
from slipstream.models.decoder import Decoder
from slipstream.models.qwen2 import upper_layer_windows


class Qwen3(Decoder):
    @staticmethod
    def read_config(hf: dict[str, Any]) -> ModelConfig:
        # Heads are wider than hidden_size / num_heads in this family; the published default is 128.
        fields = Fields.from_dict(hf).with_defaults({"head_dim": 128})
        bias, windows = fields.flag("attention_bias"), upper_layer_windows(fields)
        return read_decoder_config(fields, qk_norm=True, qkv_bias=bias, output_bias=bias, windows=windows)
