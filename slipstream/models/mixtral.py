"""Mixtral: Mistral with experts in every layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from slipstream.checkpoints.hf_config import read_decoder_config, read_experts, require, same_window
from slipstream.config import ModelConfig
from slipstream.fields import Fields
from slipstream.models.decoder import Decoder

_NAMES = {
    ".block_sparse_moe.": ".mlp.",
    ".w1.weight": ".gate_proj.weight",
    ".w3.weight": ".up_proj.weight",
    ".w2.weight": ".down_proj.weight",
}


class Mixtral(Decoder):
    @staticmethod
    def read_config(hf: dict[str, Any]) -> ModelConfig:
        fields = Fields.from_dict(hf).with_defaults({"rope_theta": 1e6})
        size, num_layers = require(fields, "intermediate_size"), require(fields, "num_hidden_layers")
        # The weights of the chosen experts always sum to one here: published as a softmax over the chosen ones.
        experts = read_experts(fields, size, range(num_layers), renormalise=True)
        return read_decoder_config(fields, windows=same_window(fields), experts=experts)

    def translate(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        for theirs, ours in _NAMES.items():
            name = name.replace(theirs, ours)
        return super().translate(name, tensor)
