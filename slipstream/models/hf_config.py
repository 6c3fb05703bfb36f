"""Reading config.json: one line of error for what is missing or unsupported, never a silent default that matters."""

from __future__ import annotations

from typing import Any

from slipstream.config import DTYPE_BYTES, ModelConfig, RopeConfig
from slipstream.errors import ModelError


def read_decoder_config(hf: dict[str, Any], **differences: Any) -> ModelConfig:
    """The shape of a Llama-like decoder; ``differences`` are what the architecture itself fixes."""
    hidden_act = hf.get("hidden_act", "silu")
    if hidden_act != "silu":
        raise ModelError(f"activation '{hidden_act}' in config.json is not supported; only silu is")
    hidden_size, num_heads = require(hf, "hidden_size"), require(hf, "num_attention_heads")
    head_dim = hf.get("head_dim") or hidden_size // num_heads
    max_position = require(hf, "max_position_embeddings")
    dtype = str(hf.get("torch_dtype") or hf.get("dtype") or "float32")
    values: dict[str, Any] = {
        "architecture": hf["architectures"][0],
        "vocab_size": require(hf, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": require(hf, "intermediate_size"),
        "num_layers": require(hf, "num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": hf.get("num_key_value_heads") or num_heads,
        "head_dim": head_dim,
        "rms_norm_eps": hf.get("rms_norm_eps", 1e-6),
        "max_position": max_position,
        "rope": read_rope(hf, head_dim, max_position),
        "tie_embeddings": bool(hf.get("tie_word_embeddings", False)),
        "dtype": dtype if dtype in DTYPE_BYTES else "float32",
    }
    return ModelConfig(**{**values, **differences})


def read_rope(hf: dict[str, Any], head_dim: int, max_position: int) -> RopeConfig:
    # Newer files keep everything in rope_parameters; older ones spread it over rope_theta and rope_scaling.
    scaling = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    kind: Any = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise ModelError(f"rope scaling '{kind}' in config.json is not supported; supported: default, linear, llama3")
    return RopeConfig(
        theta=float(scaling.get("rope_theta") or hf.get("rope_theta") or 10000.0),
        rotary_dim=int(head_dim * float(scaling.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1)),
        kind=kind,
        factor=float(scaling.get("factor") or 1.0),
        low_freq_factor=float(scaling.get("low_freq_factor") or 1.0),
        high_freq_factor=float(scaling.get("high_freq_factor") or 4.0),
        original_max_position=int(scaling.get("original_max_position_embeddings") or max_position),
        freq_factors=tuple(hf.get("rope_freq_factors") or ()),
    )


def require(hf: dict[str, Any], key: str) -> int:
    value = hf.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json has no valid '{key}'; is the model folder complete?")
    return value
