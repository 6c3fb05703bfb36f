"""Llama 2, 3 and 3.1, and models that use their architecture under its name, such as SmolLM2."""

from __future__ import annotations

from typing import Any

from slipstream.checkpoints.hf_config import read_decoder_config
from slipstream.config import ModelConfig
from slipstream.fields import Fields
from slipstream.models.decoder import Decoder


class Llama(Decoder):
    @staticmethod
    def read_config(hf: dict[str, Any]) -> ModelConfig:
        fields = Fields.from_dict(hf)
        bias, mlp_bias = fields.flag("attention_bias"), fields.flag("mlp_bias")
        return read_decoder_config(fields, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)
