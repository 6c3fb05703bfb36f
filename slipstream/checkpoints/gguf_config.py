"""Model configs in Hugging Face's format from the metadata of a GGUF file.

Knows the meaning of llama.cpp's keys. What cannot be expressed or is not supported is an error here, since a model with
a wrong setting still generates text, only worse.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.checkpoints.hf_config import (
    MAX_EXPERTS,
    MAX_FEED_FORWARD,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_ROPE_FACTOR,
)
from slipstream.errors import ModelError
from slipstream.fields import Fields
from slipstream.pooling import PoolingDefaults
from slipstream.text.gguf_tokenizer import read_token_id
from slipstream.values import MAX_INT32, describe_value

_CONTROL_TOKEN = 3
_POOLING = {0: PoolingDefaults(), 1: PoolingDefaults("mean"), 2: PoolingDefaults("cls"), 3: PoolingDefaults("last")}


class Metadata:
    """The metadata of one file, with the short names of its architecture's keys."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.fields = Fields.from_dict(values, str(path))
        self.path = path
        self.architecture = self.fields.text("general.architecture", "none named")

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = MAX_INT32) -> int:
        """A value such as ``block_count``; without a default it must be there."""
        return self.fields.integer(self._name(key, default), default, low=low, high=high)

    def number(self, key: str, default: float | None = None, *, low: float = 0.0, high: float = 1e30) -> float:
        return self.fields.number(self._name(key, default), default, low=low, high=high)

    def flag(self, key: str, default: bool) -> bool:
        return self.fields.flag(self._name(key, default), default)

    def text(self, key: str, default: str) -> str:
        return self.fields.text(self._name(key, default), default)

    def token_id(self, role: str) -> int | None:
        """The id of a special token by llama.cpp's name of its role, such as ``eos`` or ``padding``."""
        return read_token_id(self.fields, role)

    def _name(self, key: str, default: object) -> str:
        name = f"{self.architecture}.{key}"
        if default is None and not self.fields.has(name):
            raise ModelError(f"{self.path} lacks the metadata key {name}; convert the model again")
        if isinstance(self.fields.get(name), list):
            raise ModelError(f"{self.path}: {name} differs between layers, which is not supported")
        return name


def model_config(
    metadata: Metadata, tensor_shapes: Mapping[str, tuple[int, ...]], longrope: Mapping[str, list[float]]
) -> dict[str, Any]:
    """The content of a ``config.json``, but for the model's class and the type of its weights.

    ``tensor_shapes`` has Hugging Face names; some settings only show in which tensors there are. ``longrope`` has the
    factors of that scaling, which are tensors as well, by their names in a config.
    """
    embedding = tensor_shapes.get("model.embed_tokens.weight")
    if embedding is None:
        raise ModelError(f"{metadata.path} holds no token embedding; download a complete model")
    num_heads = metadata.integer("attention.head_count", high=MAX_HEADS)
    hidden_size = metadata.integer("embedding_length", high=MAX_HIDDEN)
    head_dim = metadata.integer("attention.key_length", max(1, hidden_size // num_heads), high=MAX_HEADS)
    rotary_dim = metadata.integer("rope.dimension_count", head_dim, high=head_dim)
    config = {
        "hidden_size": hidden_size,
        "intermediate_size": metadata.integer("feed_forward_length", high=MAX_FEED_FORWARD),
        "num_hidden_layers": metadata.integer("block_count", high=MAX_LAYERS),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", num_heads, high=MAX_HEADS),
        "head_dim": head_dim,
        "partial_rotary_factor": rotary_dim / head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon", high=1.0),
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(metadata, longrope),
        "max_position_embeddings": metadata.integer("context_length", high=MAX_POSITIONS),
        "vocab_size": embedding[0],
        "tie_word_embeddings": "lm_head.weight" not in tensor_shapes,
        "attention_bias": any(name.endswith("q_proj.bias") for name in tensor_shapes),
        "mlp_bias": any(name.endswith("up_proj.bias") for name in tensor_shapes),
        "bos_token_id": metadata.token_id("bos"),
        "eos_token_id": metadata.token_id("eos"),
        "pad_token_id": metadata.token_id("padding"),
    }
    if window := metadata.integer("attention.sliding_window", 0, low=0):
        config["sliding_window"] = window
    if num_experts := metadata.integer("expert_count", 0, low=0, high=MAX_EXPERTS):
        config |= _expert_settings(metadata, num_experts)
    return config


def _expert_settings(metadata: Metadata, num_experts: int) -> dict[str, Any]:
    size = metadata.integer("feed_forward_length", high=MAX_FEED_FORWARD)
    return {
        "num_local_experts": num_experts,
        "num_experts_per_tok": metadata.integer("expert_used_count", high=MAX_EXPERTS),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length", size, high=MAX_FEED_FORWARD),
        "norm_topk_prob": metadata.flag("expert_weights_norm", True),  # llama.cpp's default
    }


def gemma3_settings(metadata: Metadata) -> dict[str, Any]:
    num_layers, num_heads = metadata.integer("block_count"), metadata.integer("attention.head_count")
    hidden_size = metadata.integer("embedding_length")
    # The scores of the 27B model are scaled by a head size that its heads no longer have.
    wide = num_layers == 62
    settings = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": hidden_size // num_heads if wide else metadata.integer("attention.key_length"),
        "rope_local_base_freq": metadata.number("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 0.0) or None,
    }
    pattern = metadata.fields.get(f"{metadata.architecture}.attention.sliding_window_pattern")
    if isinstance(pattern, list):
        settings["layer_types"] = ["sliding_attention" if windowed else "full_attention" for windowed in pattern]
    else:
        settings["sliding_window_pattern"] = metadata.integer("attention.sliding_window_pattern", 6, high=MAX_LAYERS)
    return settings


def pooling_defaults(metadata: Metadata) -> PoolingDefaults:
    """How vectors are made, as the file says with llama.cpp's numbers; few files of decoders do."""
    kind = metadata.integer("pooling_type", 0, low=0)
    refusal = f"{metadata.path} asks for pooling of type {kind}, which is not supported"
    return _POOLING.get(kind, PoolingDefaults(refusal=refusal))


def generation_config(metadata: Metadata, end_tokens: tuple[str, ...]) -> dict[str, Any]:
    """The tokens that begin and end a generation: those the file names, and those known to end a turn of the model."""
    ends = [metadata.token_id(role) for role in ("eos", "eot", "eom")]
    tokens, types = (
        metadata.fields.texts("tokenizer.ggml.tokens"),
        metadata.fields.integers("tokenizer.ggml.token_type"),
    )
    # Only control tokens: an ordinary token with the same text must not end a generation.
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
    kind = metadata.text("rope.scaling.type", "none")
    attn_factor = metadata.number("rope.scaling.attn_factor", 1.0, high=MAX_ROPE_FACTOR)
    if kind in ("none", "longrope") and len(longrope) == 2:
        return {
            "rope_type": "longrope",
            **longrope,
            "attention_factor": attn_factor,
            "original_max_position_embeddings": _original_context(metadata),
        }
    if kind == "none":
        factor = metadata.number("rope.scale_linear", 1.0, high=MAX_ROPE_FACTOR)  # the key in files of 2023
        return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    factor = metadata.number("rope.scaling.factor", 1.0, high=MAX_ROPE_FACTOR)
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise ModelError(
            f"{metadata.path} scales its rotary embedding by {describe_value(kind)}; "
            "linear, yarn, llama3, and longrope with its factors are supported"
        )
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": _original_context(metadata),
        "beta_fast": metadata.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": metadata.number("rope.scaling.yarn_beta_slow", 1.0),
    }
    if attn_factor != 1.0:
        # llama.cpp multiplies yarn's own factor by this one; Hugging Face stores the product.
        scaling["attention_factor"] = attn_factor * (1.0 + 0.1 * math.log(max(factor, 1.0)))
    return scaling


def _original_context(metadata: Metadata) -> int:
    """The context length before scaling."""
    context = metadata.integer("context_length", high=MAX_POSITIONS)
    return metadata.integer("rope.scaling.original_context_length", context, high=MAX_POSITIONS)
