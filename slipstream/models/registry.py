"""Architectures by their name in config.json. Files are imported when their architecture is used."""

from __future__ import annotations

import importlib
import re
from typing import Any, Protocol, cast

from slipstream.checkpoints.hf_config import read_architecture_name
from slipstream.config import ModelConfig
from slipstream.errors import ModelError, nearest
from slipstream.fields import Fields
from slipstream.models.decoder import Decoder
from slipstream.models.pooled_head import Classifier
from slipstream.values import describe_value

_ARCHITECTURES = {
    "LlamaForCausalLM": ("slipstream.models.llama", "Llama"),
    "MistralForCausalLM": ("slipstream.models.mistral", "Mistral"),
    "MixtralForCausalLM": ("slipstream.models.mixtral", "Mixtral"),
    "Gemma3ForCausalLM": ("slipstream.models.gemma3", "Gemma3"),
    "Phi3ForCausalLM": ("slipstream.models.phi3", "Phi3"),
    "Qwen2ForCausalLM": ("slipstream.models.qwen2", "Qwen2"),
    "BertModel": ("slipstream.models.bert", "Bert"),
    "BertForSequenceClassification": ("slipstream.models.bert", "Bert"),
    "RobertaModel": ("slipstream.models.bert", "Roberta"),
    "RobertaForSequenceClassification": ("slipstream.models.bert", "Roberta"),
    "XLMRobertaModel": ("slipstream.models.bert", "Roberta"),
    "XLMRobertaForSequenceClassification": ("slipstream.models.bert", "Roberta"),
    "MPNetModel": ("slipstream.models.mpnet", "MPNet"),
    "MPNetForSequenceClassification": ("slipstream.models.mpnet", "MPNet"),
    "DeepseekV2ForCausalLM": ("slipstream.models.deepseek", "DeepseekV2"),
    "DeepseekV3ForCausalLM": ("slipstream.models.deepseek", "DeepseekV3"),
    "DeepseekV32ForCausalLM": ("slipstream.models.deepseek", "DeepseekV32"),
    "Qwen3ForCausalLM": ("slipstream.models.qwen3", "Qwen3"),
    "Qwen3MoeForCausalLM": ("slipstream.models.qwen3_moe", "Qwen3Moe"),
    "Qwen3NextForCausalLM": ("slipstream.models.qwen3_next", "Qwen3Next"),
    "Qwen3_5ForCausalLM": ("slipstream.models.qwen3_next", "Qwen3Next"),
    "Qwen3_5MoeForCausalLM": ("slipstream.models.qwen3_next", "Qwen3Next"),
    "WhisperForConditionalGeneration": ("slipstream.models.whisper", "Whisper"),
}


registered: dict[str, Architecture] = {}


class Architecture(Protocol):
    @property
    def layer_pattern(self) -> re.Pattern[str]:
        """What the names of a layer's tensors in checkpoints begin with; its group is the layer's number."""
        ...

    @property
    def classifier(self) -> Classifier | None:
        """Where checkpoints that classify texts keep what they do so with."""
        ...

    def __call__(self, config: ModelConfig, max_position: int) -> Decoder: ...

    @staticmethod
    def read_config(hf: dict[str, Any]) -> ModelConfig: ...


def register(name: str, architecture: Architecture) -> None:
    """Register an architecture under its name in config.json."""
    if name in _ARCHITECTURES or registered.get(name, architecture) is not architecture:
        raise ValueError(f"two architectures are called {name}")
    registered[name] = architecture


def architecture_of(hf: dict[str, Any]) -> Architecture:
    name = read_architecture_name(Fields.from_dict(hf))
    if name in registered:
        return registered[name]
    if name not in _ARCHITECTURES:
        raise ModelError(
            f"architecture {describe_value(name)} is not supported{nearest(name, _ARCHITECTURES)} "
            f"(supported: {', '.join(_ARCHITECTURES)})"
        )
    module, class_name = _ARCHITECTURES[name]
    return cast(Architecture, getattr(importlib.import_module(module), class_name))
