"""Parts of a head's config that its kinds have in common."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from slipstream.checkpoints.hf_config import layer_windows
from slipstream.config import ModelConfig
from slipstream.errors import ModelError, nearest
from slipstream.fields import Fields
from slipstream.models.heads.network import HeadPlan
from slipstream.models.registry import architecture_of
from slipstream.values import describe_value

# The decoder layers a head may consist of, by ``model_type``. The first EAGLE heads use these names for themselves.
BODIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# The number of MTP layers of a target: the key that DeepSeek uses, and Qwen's.
DEEPSEEK_COUNT, QWEN_COUNT = "num_nextn_predict_layers", "mtp_num_hidden_layers"

_SHOWN = 60  # characters of a value in a message
# Keys with these parts in their names describe variants of the network. An unknown one must not be ignored.
_VARIANT_WORDS = ("norm", "eagle", "draft", "fusion", "aux_hidden", "fc_")


def read_body(hf: Fields) -> ModelConfig:
    """The shape of the head's decoder layers."""
    model_type = str(hf.get("model_type") or "llama")[:_SHOWN]
    if model_type not in BODIES:
        raise ModelError(
            f"'model_type' of the head is '{model_type}', which is not supported; supported: {', '.join(BODIES)}"
        )
    config = architecture_of({"architectures": [BODIES[model_type]]}).read_config(hf)
    if hf.texts("layer_types"):
        # Trained heads may have a window where the architecture itself has none.
        config = replace(config, windows=layer_windows(hf, lambda _: False))
    return config


def read_flag(hf: Fields, key: str, default: bool = False) -> bool:
    """A flag of the head's network, at top level or in ``eagle_config``."""
    for fields in (hf, hf.get("eagle_config") or {}):
        if (value := fields.get(key)) is not None:
            if not isinstance(value, bool):
                raise ModelError(
                    f"'{key}' in the head's config.json must be true or false, not {describe_value(value)}"
                )
            return value
    return default


def check_variant(hf: Fields, known: Collection[str], fixed: dict[str, Any]) -> None:
    """Refuse settings of another network: ignoring a flag silently would only lower acceptance.

    ``known`` keys are read; keys in ``fixed`` must have the one value that this network implements.
    """
    for prefix, inner in (("", hf), ("eagle_config.", hf.get("eagle_config") or {})):
        for key, value in inner.items():
            if key in fixed and value is not None and value != fixed[key]:
                raise ModelError(
                    f"'{prefix}{key}' in the head's config.json is {describe_value(value)}; "
                    f"only {fixed[key]!r} is supported"
                )
            suspicious = bool(prefix) or any(word in key for word in _VARIANT_WORDS)
            if value and suspicious and key not in (*known, *fixed, "rms_norm_eps", "eagle_config"):
                raise ModelError(
                    f"{describe_value(prefix + key)} in the head's config.json is a variant that is not known"
                    f"{nearest(key, known)}"
                )


def check_num_layers(plan: HeadPlan, names: Collection[str]) -> None:
    """Called before any layer is built: each layer has more than one tensor."""
    if plan.config.num_layers > max(1, len(names)):
        raise ModelError(
            f"the draft head has {len(names)} tensors, too few for the {plan.config.num_layers} layers of its config"
        )
