"""Model configs in Hugging Face's words from the metadata of a GGUF file.

Knows what llama.cpp's keys mean. What cannot be expressed or is not supported is an error here: a model that loads with
a wrong setting still talks, only worse.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.errors import ModelError

_CONTROL_TOKEN = 3


class Metadata:
    """The metadata of one file, with the keys of its architecture under their short names."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values = values
        self.path = path
        self.architecture = values.get("general.architecture")

    def get(self, key: str, default: Any = None) -> Any:
        """A value such as ``block_count``; without a default it must be there."""
        name = f"{self.architecture}.{key}"
        value = self.values.get(name, default)
        if value is None:
            raise ModelError(f"{self.path} lacks the metadata key {name}; convert the model again")
        if isinstance(value, list):
            raise ModelError(f"{self.path}: {name} differs between layers, which is not supported")
        return value

    def token_id(self, role: str) -> int | None:
        """The id of a special token by llama.cpp's name of its role, such as ``eos`` or ``padding``."""
        token_id = self.values.get(f"tokenizer.ggml.{role}_token_id")
        return None if token_id is None else int(token_id)


def model_config(
    metadata: Metadata, tensor_shapes: Mapping[str, tuple[int, ...]], longrope: Mapping[str, list[float]]
) -> dict[str, Any]:
    """The content of a ``config.json``, but for the model's class and the type of its weights.

    ``tensor_shapes`` has Hugging Face names; some settings are only visible in which tensors there are. ``longrope``
    has the factors of that scaling, which are tensors as well, by their names in a config.
    """
    embedding = tensor_shapes.get("model.embed_tokens.weight")
    if embedding is None:
        raise ModelError(f"{metadata.path} holds no token embedding; download a complete model")
    num_heads = metadata.get("attention.head_count")
    hidden_size = metadata.get("embedding_length")
    head_dim = int(metadata.get("attention.key_length", hidden_size // num_heads))
    config = {
        "hidden_size": hidden_size,
        "intermediate_size": metadata.get("feed_forward_length"),
        "num_hidden_layers": metadata.get("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "partial_rotary_factor": metadata.get("rope.dimension_count", head_dim) / head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": metadata.get("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(metadata, longrope),
        "max_position_embeddings": metadata.get("context_length"),
        "vocab_size": embedding[0],
        "tie_word_embeddings": "lm_head.weight" not in tensor_shapes,
        "attention_bias": any(name.endswith("q_proj.bias") for name in tensor_shapes),
        "mlp_bias": any(name.endswith("up_proj.bias") for name in tensor_shapes),
        "bos_token_id": metadata.token_id("bos"),
        "eos_token_id": metadata.token_id("eos"),
        "pad_token_id": metadata.token_id("padding"),
    }
    if window := metadata.get("attention.sliding_window", 0):
        config["sliding_window"] = window
    if num_experts := metadata.get("expert_count", 0):
        config |= _expert_settings(metadata, num_experts)
    return config


def _expert_settings(metadata: Metadata, num_experts: int) -> dict[str, Any]:
    size = metadata.get("feed_forward_length")
    return {
        "num_local_experts": num_experts,
        "num_experts_per_tok": metadata.get("expert_used_count"),
        "moe_intermediate_size": metadata.get("expert_feed_forward_length", size),
        "norm_topk_prob": metadata.get("expert_weights_norm", True),  # what llama.cpp does unless told otherwise
    }


def gemma3_settings(metadata: Metadata) -> dict[str, Any]:
    num_layers, num_heads = metadata.get("block_count"), metadata.get("attention.head_count")
    hidden_size = metadata.get("embedding_length")
    # The scores of the 27B model are scaled by the width of its heads before they were widened.
    wide = num_layers == 62
    settings = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": hidden_size // num_heads if wide else metadata.get("attention.key_length"),
        "rope_local_base_freq": metadata.get("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": metadata.get("final_logit_softcapping", 0.0) or None,
    }
    pattern = metadata.values.get(f"{metadata.architecture}.attention.sliding_window_pattern", 6)
    if isinstance(pattern, list):
        settings["layer_types"] = ["sliding_attention" if windowed else "full_attention" for windowed in pattern]
    else:
        settings["sliding_window_pattern"] = pattern
    return settings


def generation_config(metadata: Metadata, end_tokens: tuple[str, ...]) -> dict[str, Any]:
    """The tokens that begin and end a generation: those the file names, and those known to end a turn of the model."""
    ends = [metadata.token_id(role) for role in ("eos", "eot", "eom")]
    tokens = metadata.values.get("tokenizer.ggml.tokens", [])
    types = metadata.values.get("tokenizer.ggml.token_type", [])
    # Only control tokens: a plain word that happens to spell one must not end a generation.
    ends += [
        idx
        for idx, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == _CONTROL_TOKEN and token in end_tokens
    ]
    unique = list(dict.fromkeys(end for end in ends if end is not None))
    generation: dict[str, Any] = {"eos_token_id": unique} if unique else {}
    if (bos := metadata.token_id("bos")) is not None:
        generation["bos_token_id"] = bos
    return generation


def _rope_scaling(metadata: Metadata, longrope: Mapping[str, list[float]]) -> dict[str, Any] | None:
    kind = metadata.get("rope.scaling.type", "none")
    context = metadata.get("context_length")
    if kind in ("none", "longrope") and len(longrope) == 2:
        return {
            "rope_type": "longrope",
            **longrope,
            "attention_factor": metadata.get("rope.scaling.attn_factor", 1.0),
            "original_max_position_embeddings": metadata.get("rope.scaling.original_context_length", context),
        }
    if kind == "none":
        factor = metadata.get("rope.scale_linear", 1.0)  # how files of 2023 spell it
        return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    factor = metadata.get("rope.scaling.factor", 1.0)
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise ModelError(
            f"{metadata.path} scales its rotary embedding by '{kind}'; "
            "linear, yarn, llama3, and longrope with its factors are supported"
        )
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": metadata.get("rope.scaling.original_context_length", context),
        "beta_fast": metadata.get("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": metadata.get("rope.scaling.yarn_beta_slow", 1.0),
    }
    attn_factor = metadata.get("rope.scaling.attn_factor", 1.0)
    if attn_factor != 1.0:
        # llama.cpp multiplies yarn's own factor by this one; Hugging Face wants the product.
        scaling["attention_factor"] = attn_factor * (1.0 + 0.1 * math.log(max(factor, 1.0)))
    return scaling
