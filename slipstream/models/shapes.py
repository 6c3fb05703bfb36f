"""Shapes of well-known models, for benchmarks with random weights: the cost of a step does not depend on the values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.errors import ConfigError, nearest

_LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        **_LLAMA,
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "torch_dtype": "bfloat16",
    },
    "smollm2-135m": {
        **_LLAMA,
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
    # A third of the layers of Qwen3-Next-80B-A3B, with an eighth of the experts: its delta nets and its attention at a
    # size that is built in seconds. A token has as many experts as in the original.
    "qwen3-next-16l-64e": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_act": "silu",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "full_attention_interval": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "num_experts": 64,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144,
        "rope_theta": 10000000.0,
        "torch_dtype": "bfloat16",
    },
}

# Heads of these shapes: one layer of the target's size, with a reduced vocabulary where the target's is large.
HEAD_SHAPES: dict[str, dict[str, Any]] = {
    f"{name}-eagle3": {
        **SHAPES[name],
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": draft_vocab_size,
        "tie_word_embeddings": False,
    }
    for name, draft_vocab_size in (("llama-3.1-8b", 32000), ("smollm2-135m", 16000))
}

# The probability that the first i + 1 drafts are all accepted: vLLM's rates in its own measurements, continued past 3.
FORCED_RATES = (0.730, 0.521, 0.355, 0.245, 0.170, 0.118, 0.082)


def forced_eagle3(shape: str, k: int, rates: Sequence[float] = FORCED_RATES) -> dict[str, Any]:
    """A ``speculative_config``: a head of that shape, drafts accepted at fixed rates. The text is meaningless."""
    return {
        "method": "eagle3",
        "model": f"{shape}-eagle3",
        "num_speculative_tokens": k,
        "verify": "synthetic",
        "acceptance_rates": tuple(rates[:k]),
    }


def weight_bytes(shape: str) -> int:
    """Bytes of the weights of a shape, or of a head, that one pass reads in 16 bits, without the embedding."""
    config = {**SHAPES, **HEAD_SHAPES}[shape]
    if "num_experts" in config:
        raise ConfigError(f"which weights of {shape} a pass reads depends on the experts that its tokens choose")
    hidden: int = config["hidden_size"]
    vocab_size: int = config.get("draft_vocab_size", config["vocab_size"])
    inputs = 2 if shape in HEAD_SHAPES else 1  # a head's input is two concatenated states
    kv: int = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    mlp: int = 3 * hidden * config["intermediate_size"]
    layer = inputs * hidden * (hidden + 2 * kv) + hidden * hidden + mlp
    num_layers: int = config["num_hidden_layers"]
    return 2 * (num_layers * layer + hidden * vocab_size)


def step_bytes(shape: str, k: int) -> int:
    """Bytes of all weights that a step reads: the target's once, and a head's once for each of its drafts."""
    if not k:
        return weight_bytes(shape)
    hidden: int = SHAPES[shape]["hidden_size"]
    mix = 2 * 3 * hidden * hidden  # of three taps, once per step
    return weight_bytes(shape) + mix + k * weight_bytes(f"{shape}-eagle3")


def shape_config(name: str) -> dict[str, Any]:
    if name not in SHAPES:
        raise ConfigError(f"unknown shape '{name}'{nearest(name, SHAPES)} (known: {', '.join(SHAPES)})")
    return SHAPES[name]
