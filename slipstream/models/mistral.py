"""Mistral: Llama in which a token sees a window of the positions before it. Later versions set no window."""

from __future__ import annotations

from typing import Any

from slipstream.checkpoints.hf_config import read_decoder_config, same_window
from slipstream.config import ModelConfig
from slipstream.fields import Fields
from slipstream.models.decoder import Decoder


class Mistral(Decoder):
    @staticmethod
    def read_config(hf: dict[str, Any]) -> ModelConfig:
        # A config without the key means the first version's window; later ones set null.
        fields = Fields.from_dict(hf)
        return read_decoder_config(fields, windows=same_window(fields.with_defaults({"sliding_window": 4096})))
