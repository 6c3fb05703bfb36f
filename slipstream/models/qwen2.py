"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values."""

from __future__ import annotations

from typing import Any

from slipstream.config import ModelConfig
from slipstream.models.decoder import Decoder
from slipstream.models.hf_config import layer_windows, read_decoder_config


class Qwen2(Decoder):
    @staticmethod
    def read_config(hf: dict[str, Any]) -> ModelConfig:
        return read_decoder_config(hf, qkv_bias=True, windows=upper_layer_windows(hf))


def upper_layer_windows(hf: dict[str, Any]) -> tuple[int, ...]:
    """Windows in the layers from ``max_window_layers`` up, where the config turns them on at all."""
    if not hf.get("use_sliding_window"):
        return ()
    first = hf.get("max_window_layers", 28)
    return layer_windows({"sliding_window": 4096, **hf}, lambda idx: idx >= first)
