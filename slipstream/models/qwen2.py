"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values."""

from __future__ import annotations

from typing import Any

from slipstream.checkpoints.hf_config import layer_windows, read_decoder_config
from slipstream.config import ModelConfig
from slipstream.fields import Fields
from slipstream.models.decoder import Decoder


class Qwen2(Decoder):
    @staticmethod
    def read_config(hf: dict[str, Any]) -> ModelConfig:
        fields = Fields.from_dict(hf)
        return read_decoder_config(fields, qkv_bias=True, windows=upper_layer_windows(fields))


def upper_layer_windows(fields: Fields) -> tuple[int, ...]:
    """Windows in the layers from ``max_window_layers`` up, where the config enables them."""
    if not fields.flag("use_sliding_window"):
        return ()
    first = fields.integer("max_window_layers", 28, low=0)
    return layer_windows(fields.with_defaults({"sliding_window": 4096}), lambda idx: idx >= first)
