"""Reading config.json: one line of error for what is missing or unsupported, never a silent default that matters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from slipstream.config import DTYPE_BYTES, ExpertsConfig, ModelConfig, RopeConfig
from slipstream.errors import ModelError

_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_ROPE_KINDS = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")


def read_decoder_config(hf: dict[str, Any], **differences: Any) -> ModelConfig:
    """The shape of a Llama-like decoder; ``differences`` are what the architecture itself fixes."""
    hidden_act = hf.get("hidden_act", "silu")
    if hidden_act not in _ACTIVATIONS:
        raise ModelError(
            f"activation '{hidden_act}' in config.json is not supported; supported: {', '.join(_ACTIVATIONS)}"
        )
    hidden_size, num_heads = require(hf, "hidden_size"), require(hf, "num_attention_heads")
    head_dim = require(hf, "head_dim") if hf.get("head_dim") else hidden_size // num_heads
    rope = read_rope(hf, head_dim, require(hf, "max_position_embeddings"))
    dtype = str(hf.get("torch_dtype") or hf.get("dtype") or "float32")
    values: dict[str, Any] = {
        "architecture": hf["architectures"][0],
        "vocab_size": require(hf, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": require(hf, "intermediate_size"),
        "num_layers": require(hf, "num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": require(hf, "num_key_value_heads") if hf.get("num_key_value_heads") else num_heads,
        "head_dim": head_dim,
        "rms_norm_eps": hf.get("rms_norm_eps", 1e-6),
        "max_position": _usable_positions(rope, require(hf, "max_position_embeddings")),
        "rope": rope,
        "activation": _ACTIVATIONS[hidden_act],
        "tie_embeddings": bool(hf.get("tie_word_embeddings", False)),
        "dtype": dtype if dtype in DTYPE_BYTES else "float32",
    }
    return ModelConfig(**{**values, **differences})


def read_rope(hf: dict[str, Any], head_dim: int, max_position: int) -> RopeConfig:
    # Newer files keep everything in rope_parameters; older ones spread it over rope_theta and rope_scaling.
    scaling = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    kind: Any = scaling.get("rope_type") or scaling.get("type") or "default"
    kind = "longrope" if kind == "su" else kind  # its first name
    if kind not in _ROPE_KINDS:
        raise ModelError(f"rope scaling '{kind}' in config.json is not supported; supported: {', '.join(_ROPE_KINDS)}")
    original = hf.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings")
    if kind == "dynamic" or not original:
        original = max_position
    factor = float(scaling.get("factor") or (max_position / original if kind in ("yarn", "longrope") else 1.0))
    partial = float(scaling.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1)
    rotary_dim = int(head_dim * partial + 1e-6)  # 60 of 88 as a fraction times 88 is not quite 60
    return RopeConfig(
        theta=float(scaling.get("rope_theta") or hf.get("rope_theta") or 10000.0),
        rotary_dim=rotary_dim,
        kind=kind,
        factor=factor,
        low_freq_factor=float(scaling.get("low_freq_factor") or 1.0),
        high_freq_factor=float(scaling.get("high_freq_factor") or 4.0),
        original_max_position=int(original),
        attention_factor=_attention_factor(kind, scaling, factor, int(original)),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        truncate=bool(scaling.get("truncate", True)),
        short_factors=_frequency_factors("short_factor", scaling, kind, rotary_dim),
        long_factors=_frequency_factors("long_factor", scaling, kind, rotary_dim),
        freq_factors=tuple(hf.get("rope_freq_factors") or ()),
    )


def _attention_factor(kind: str, scaling: dict[str, Any], factor: float, original: int) -> float:
    """What the config says, else what the papers of yarn and longrope recommend for the factor."""
    if kind not in ("yarn", "longrope"):
        return 1.0
    if (given := scaling.get("attention_factor")) is not None:
        return float(given)
    if factor <= 1.0:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original))
    one, all_dims = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if one and all_dims:
        return float((0.1 * one * math.log(factor) + 1) / (0.1 * all_dims * math.log(factor) + 1))
    return 0.1 * math.log(factor) + 1


def _frequency_factors(key: str, scaling: dict[str, Any], kind: str, rotary_dim: int) -> tuple[float, ...]:
    if kind != "longrope":
        return ()
    factors = scaling.get(key) or ()
    if len(factors) != rotary_dim // 2:
        raise ModelError(f"config.json has {len(factors)} values of '{key}' for longrope; {rotary_dim // 2} are needed")
    return tuple(float(value) for value in factors)


def _usable_positions(rope: RopeConfig, max_position: int) -> int:
    """Configs that stretch a context by yarn or dynamic scaling may still name the length before it."""
    if rope.kind in ("yarn", "dynamic"):
        return max(max_position, int(rope.original_max_position * rope.factor))
    return max_position


def same_window(hf: dict[str, Any]) -> tuple[int, ...]:
    """The config's ``sliding_window`` in every layer; nothing where it is null."""
    return layer_windows({**hf, "layer_types": None}, lambda _: True)


def layer_windows(hf: dict[str, Any], is_windowed: Callable[[int], bool]) -> tuple[int, ...]:
    """Each layer's window: as the config's ``layer_types`` say, else by the architecture's rule."""
    if hf.get("sliding_window") is None:
        return ()
    window, num_layers = require(hf, "sliding_window"), require(hf, "num_hidden_layers")
    if (types := hf.get("layer_types")) is None:
        return tuple(window if is_windowed(idx) else 0 for idx in range(num_layers))
    sizes = {"sliding_attention": window, "full_attention": 0}
    if len(types) != num_layers or not set(types) <= set(sizes):
        raise ModelError(f"config.json's layer_types must name {' or '.join(sizes)} for each of {num_layers} layers")
    return tuple(sizes[kind] for kind in types)


def read_experts(
    hf: dict[str, Any], size: int, renormalise: bool, layer_ids: Iterable[int], shared_size: int = 0
) -> ExpertsConfig:
    num_experts = require(hf, "num_experts" if "num_experts" in hf else "num_local_experts")
    num_chosen = require(hf, "num_experts_per_tok")
    if num_chosen > num_experts:
        raise ModelError(f"config.json gives a token {num_chosen} of {num_experts} experts")
    if hf.get("hidden_act", "silu") != "silu":
        raise ModelError(f"activation '{hf['hidden_act']}' in config.json is not supported for experts; only silu is")
    return ExpertsConfig(num_experts, num_chosen, size, renormalise, tuple(layer_ids), shared_size)


def require(hf: dict[str, Any], key: str) -> int:
    value = hf.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json has no valid '{key}'; is the model folder complete?")
    return value
