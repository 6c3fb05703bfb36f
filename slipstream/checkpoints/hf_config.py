"""Reading config.json: what is missing or unsupported is an error of one line, never a silent default that matters.

Every number has a range. Sizes are limited well above any published model, and so that no product of them exceeds 64
bits; whether they match a checkpoint is checked against its tensors, in ``load``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from slipstream.config import DTYPE_BYTES, ModelConfig, RopeConfig
from slipstream.errors import ModelError
from slipstream.experts_config import ExpertsConfig, Routing
from slipstream.fields import Fields
from slipstream.values import MAX_INT32, describe_value

_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_ROPE_KINDS = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")

MAX_LAYERS, MAX_HIDDEN, MAX_HEADS, MAX_EXPERTS = 1 << 12, 1 << 18, 1 << 12, 1 << 14
MAX_FEED_FORWARD, MAX_VOCAB, MAX_POSITIONS = 1 << 20, 1 << 24, 1 << 24
MAX_ROPE_FACTOR = 1e6
_LARGEST = {
    "num_hidden_layers": MAX_LAYERS,
    "hidden_size": MAX_HIDDEN,
    "target_hidden_size": MAX_HIDDEN,
    "num_attention_heads": MAX_HEADS,
    "num_key_value_heads": MAX_HEADS,
    "head_dim": MAX_HEADS,
    "linear_num_key_heads": MAX_HEADS,
    "linear_num_value_heads": MAX_HEADS,
    "linear_key_head_dim": MAX_HEADS,
    "linear_value_head_dim": MAX_HEADS,
    "linear_conv_kernel_dim": 64,
    "intermediate_size": MAX_FEED_FORWARD,
    "moe_intermediate_size": MAX_FEED_FORWARD,
    "shared_expert_intermediate_size": MAX_FEED_FORWARD,
    "num_experts": MAX_EXPERTS,
    "num_local_experts": MAX_EXPERTS,
    "n_routed_experts": MAX_EXPERTS,
    "n_shared_experts": MAX_EXPERTS,
    "num_experts_per_tok": MAX_EXPERTS,
    "n_group": MAX_EXPERTS,
    "topk_group": MAX_EXPERTS,
    "vocab_size": MAX_VOCAB,
    "draft_vocab_size": MAX_VOCAB,
    "max_position_embeddings": MAX_POSITIONS,
    "original_max_position_embeddings": MAX_POSITIONS,
    "sliding_window": MAX_INT32,
}


def read_decoder_config(hf: dict[str, Any], **differences: Any) -> ModelConfig:
    """The shape of a Llama-like decoder; ``differences`` are what the architecture sets."""
    fields = Fields.from_dict(hf)
    hidden_act = fields.text("hidden_act", "silu")
    if hidden_act not in _ACTIVATIONS:
        raise ModelError(
            f"activation {describe_value(hidden_act)} in {fields.source} is not supported; "
            f"supported: {', '.join(_ACTIVATIONS)}"
        )
    hidden_size, num_heads = require(fields, "hidden_size"), require(fields, "num_attention_heads")
    head_dim = require(fields, "head_dim", max(1, hidden_size // num_heads))
    rope = read_rope(fields, head_dim, require(fields, "max_position_embeddings"))
    dtype = fields.text("torch_dtype" if fields.has("torch_dtype") else "dtype", "float32")
    values: dict[str, Any] = {
        "architecture": read_architecture_name(fields),
        "vocab_size": require(fields, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": require(fields, "intermediate_size"),
        "num_layers": require(fields, "num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": require(fields, "num_key_value_heads", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6, low=0.0, high=1.0),
        "max_position": _usable_positions(fields, rope, require(fields, "max_position_embeddings")),
        "rope": rope,
        "activation": _ACTIVATIONS[hidden_act],
        "tie_embeddings": fields.flag("tie_word_embeddings"),
        "dtype": dtype if dtype in DTYPE_BYTES else "float32",
        "quantization": dict(fields.section("quantization_config")) if fields.has("quantization_config") else None,
    }
    if num_heads % values["num_kv_heads"]:
        raise ModelError(f"{fields.source} has {num_heads} heads for {values['num_kv_heads']} heads of keys and values")
    return ModelConfig(**{**values, **differences})


def read_architecture_name(fields: Fields) -> str:
    """The first of the names that a config lists."""
    return next(iter(fields.texts("architectures")), "none named")


def read_rope(hf: dict[str, Any], head_dim: int, max_position: int) -> RopeConfig:
    fields = Fields.from_dict(hf)
    scaling = _join_rope_sections(fields)
    kind: Any = _given_text(scaling, "rope_type", "type") or "default"
    kind = "longrope" if kind == "su" else kind  # its original name
    if kind not in _ROPE_KINDS:
        raise ModelError(
            f"rope scaling {describe_value(kind)} in {fields.source} is not supported; "
            f"supported: {', '.join(_ROPE_KINDS)}"
        )
    original = max_position
    if kind != "dynamic":
        source = fields if fields.has("original_max_position_embeddings") else scaling
        original = require(source, "original_max_position_embeddings", max_position)
    if original < 2:  # its logarithm is a divisor
        raise ModelError(f"{fields.source} has a rotary embedding over {original} position; at least two are needed")
    usual = max_position / original if kind in ("yarn", "longrope") else 1.0
    factor = scaling.number("factor", usual, above=0.0, high=MAX_ROPE_FACTOR)
    low = scaling.number("low_freq_factor", 1.0, above=0.0, high=MAX_ROPE_FACTOR)
    high = scaling.number("high_freq_factor", 4.0, above=0.0, high=MAX_ROPE_FACTOR)
    if kind == "llama3" and low >= high:
        raise ModelError(f"{fields.source} has a low_freq_factor of {low:g}, which is not below high_freq_factor")
    key = "partial_rotary_factor"
    partial = _either(scaling, fields, key).number(key, 1.0, above=0.0, high=1.0)
    rotary_dim = int(head_dim * partial + 1e-6)  # 60/88 as a float times 88 is slightly below 60
    return RopeConfig(
        theta=_either(scaling, fields, "rope_theta").number("rope_theta", 10000.0, above=1.0),
        rotary_dim=rotary_dim,
        kind=kind,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=original,
        attention_factor=_attention_factor(kind, scaling, factor, original),
        beta_fast=scaling.number("beta_fast", 32.0, above=0.0),
        beta_slow=scaling.number("beta_slow", 1.0, above=0.0),
        truncate=scaling.flag("truncate", True),
        short_factors=_frequency_factors("short_factor", scaling, kind, rotary_dim),
        long_factors=_frequency_factors("long_factor", scaling, kind, rotary_dim),
        freq_factors=_free_factors(fields, rotary_dim),
    )


def _join_rope_sections(fields: Fields) -> Fields:
    """Newer files keep everything in rope_parameters, older ones in rope_theta and rope_scaling."""
    older, newer = fields.section("rope_scaling"), fields.section("rope_parameters")
    return Fields({**older, **newer}, fields.source, (newer or older).prefix)


def _given_text(fields: Fields, *keys: str) -> str:
    """The value of the first key that has one."""
    return next((fields.text(key) for key in keys if fields.has(key)), "")


def _either(first: Fields, second: Fields, key: str) -> Fields:
    return first if first.has(key) else second


def _attention_factor(kind: str, scaling: Fields, factor: float, original: int) -> float:
    """The config's value, else the one that the yarn and longrope papers recommend for the factor."""
    if kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.has("attention_factor"):
        return scaling.number("attention_factor", above=0.0, high=MAX_ROPE_FACTOR)
    if factor <= 1.0:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original))
    one = scaling.number("mscale", 0.0, low=0.0, high=MAX_ROPE_FACTOR)
    all_dims = scaling.number("mscale_all_dim", 0.0, low=0.0, high=MAX_ROPE_FACTOR)
    if one and all_dims:
        return (0.1 * one * math.log(factor) + 1) / (0.1 * all_dims * math.log(factor) + 1)
    return 0.1 * math.log(factor) + 1


def _frequency_factors(key: str, scaling: Fields, kind: str, rotary_dim: int) -> tuple[float, ...]:
    if kind != "longrope":
        return ()
    factors = scaling.numbers(key, above=0.0)
    if len(factors) != rotary_dim // 2:
        raise ModelError(
            f"{scaling.source} has {len(factors)} values of '{key}' for longrope; {rotary_dim // 2} are needed"
        )
    return tuple(factors)


def _free_factors(fields: Fields, rotary_dim: int) -> tuple[float, ...]:
    """The factors of a GGUF file, which may encode any scaling."""
    factors = tuple(fields.numbers("rope_freq_factors", above=0.0))
    if factors and len(factors) != rotary_dim // 2:
        raise ModelError(f"{fields.source} has {len(factors)} rope_freq_factors; {rotary_dim // 2} are needed")
    return factors


def _usable_positions(fields: Fields, rope: RopeConfig, max_position: int) -> int:
    """Configs that extend a context by yarn or dynamic scaling may still give the original length."""
    if rope.kind not in ("yarn", "dynamic"):
        return max_position
    stretched = int(rope.original_max_position * rope.factor)
    if stretched > MAX_POSITIONS:
        raise ModelError(
            f"{fields.source} stretches {rope.original_max_position} positions {rope.factor:g} times; at most "
            f"{MAX_POSITIONS} are supported"
        )
    return max(max_position, stretched)


def same_window(hf: dict[str, Any]) -> tuple[int, ...]:
    """The config's ``sliding_window`` in every layer; nothing where it is null."""
    return layer_windows(Fields.from_dict(hf).changed(layer_types=None), lambda _: True)


def layer_windows(hf: dict[str, Any], is_windowed: Callable[[int], bool]) -> tuple[int, ...]:
    """Each layer's window: from the config's ``layer_types``, else by the architecture's rule."""
    fields = Fields.from_dict(hf)
    if not fields.has("sliding_window"):
        return ()
    window, num_layers = require(fields, "sliding_window"), require(fields, "num_hidden_layers")
    if not fields.has("layer_types"):
        return tuple(window if is_windowed(idx) else 0 for idx in range(num_layers))
    sizes = {"sliding_attention": window, "full_attention": 0}
    return tuple(sizes[kind] for kind in read_layer_types(fields, tuple(sizes)))


def read_layer_types(fields: Fields, known: tuple[str, ...]) -> list[str]:
    types, num_layers = fields.texts("layer_types"), require(fields, "num_hidden_layers")
    if len(types) != num_layers or not set(types) <= set(known):
        raise ModelError(
            f"{fields.source}'s layer_types must name {' or '.join(known)} for each of {num_layers} layers"
        )
    return types


def read_expert_layers(fields: Fields) -> list[int]:
    """Layers with experts, for configs that list the dense layers."""
    step, dense = fields.integer("decoder_sparse_step", 1, high=MAX_LAYERS), set(fields.integers("mlp_only_layers"))
    return [i for i in range(require(fields, "num_hidden_layers")) if i not in dense and (i + 1) % step == 0]


_EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")


def read_experts(
    hf: dict[str, Any],
    size: int,
    layer_ids: Iterable[int],
    shared_size: int = 0,
    shared_gate: bool = False,
    **routing: Any,
) -> ExpertsConfig:
    """Experts of ``size``; ``routing`` are the fields of ``Routing`` that the architecture sets."""
    fields = Fields.from_dict(hf)
    num_experts = require(fields, next((key for key in _EXPERT_COUNTS if key in fields), _EXPERT_COUNTS[-1]))
    how = Routing(require(fields, "num_experts_per_tok"), **routing)
    _check_routing(how, num_experts, fields.source)
    if (activation := fields.text("hidden_act", "silu")) != "silu":
        raise ModelError(
            f"activation {describe_value(activation)} in {fields.source} is not supported for experts; only silu is"
        )
    return ExpertsConfig(num_experts, size, how, tuple(layer_ids), shared_size, shared_gate)


def _check_routing(routing: Routing, num_experts: int, source: str) -> None:
    num_groups, kept = routing.num_groups, routing.num_kept_groups
    if routing.num_chosen > num_experts:
        raise ModelError(f"{source} gives a token {routing.num_chosen} of {num_experts} experts")
    if kept > num_groups:
        raise ModelError(f"{source} keeps {kept} of {num_groups} groups of experts")
    if not routing.has_groups:
        return
    group_size = num_experts // num_groups
    if num_experts % num_groups or group_size < 2:
        raise ModelError(
            f"{source} has {num_experts} experts in {num_groups} groups of one size; at least two each are needed"
        )
    if routing.num_chosen > kept * group_size:
        raise ModelError(
            f"{source} gives a token {routing.num_chosen} experts of {kept} groups of {group_size}, which are too few"
        )


def require(hf: dict[str, Any], key: str, default: int | None = None) -> int:
    """A size or a count; without a default it must be present."""
    return Fields.from_dict(hf).integer(key, default, high=_LARGEST[key])
