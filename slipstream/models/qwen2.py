"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values."""

from __future__ import annotations

from typing import Any

from slipstream.config import ModelConfig
from slipstream.errors import ModelError
from slipstream.models.decoder import Decoder
from slipstream.models.hf_config import read_decoder_config


class Qwen2(Decoder):
    @staticmethod
    def read_config(hf: dict[str, Any]) -> ModelConfig:
        refuse_sliding_window(hf)
        return read_decoder_config(hf, qkv_bias=True)


def refuse_sliding_window(hf: dict[str, Any]) -> None:
    if hf.get("use_sliding_window"):
        raise ModelError("config.json turns on use_sliding_window, which this architecture does not support here")
