"""Architectures by the name a config.json gives them. Files are imported when their architecture is asked for."""

from __future__ import annotations

import importlib
from typing import Any, Protocol, cast

from slipstream.config import ModelConfig
from slipstream.errors import ModelError, nearest
from slipstream.models.decoder import Decoder

_ARCHITECTURES = {
    "LlamaForCausalLM": ("slipstream.models.llama", "Llama"),
    "MistralForCausalLM": ("slipstream.models.mistral", "Mistral"),
    "MixtralForCausalLM": ("slipstream.models.mixtral", "Mixtral"),
    "Gemma3ForCausalLM": ("slipstream.models.gemma3", "Gemma3"),
    "Phi3ForCausalLM": ("slipstream.models.phi3", "Phi3"),
    "Qwen2ForCausalLM": ("slipstream.models.qwen2", "Qwen2"),
    "Qwen3ForCausalLM": ("slipstream.models.qwen3", "Qwen3"),
    "Qwen3MoeForCausalLM": ("slipstream.models.qwen3_moe", "Qwen3Moe"),
    "Qwen3NextForCausalLM": ("slipstream.models.qwen3_next", "Qwen3Next"),
    "Qwen3_5ForCausalLM": ("slipstream.models.qwen3_next", "Qwen3Next"),
    "Qwen3_5MoeForCausalLM": ("slipstream.models.qwen3_next", "Qwen3Next"),
}


class Architecture(Protocol):
    def __call__(self, config: ModelConfig, max_position: int) -> Decoder: ...

    @staticmethod
    def read_config(hf: dict[str, Any]) -> ModelConfig: ...


def architecture_of(hf: dict[str, Any]) -> Architecture:
    names = hf.get("architectures") or ["none named"]
    if names[0] not in _ARCHITECTURES:
        raise ModelError(
            f"architecture '{names[0]}' is not supported{nearest(names[0], _ARCHITECTURES)} "
            f"(supported: {', '.join(_ARCHITECTURES)})"
        )
    module, name = _ARCHITECTURES[names[0]]
    return cast(Architecture, getattr(importlib.import_module(module), name))
