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
    # all-MiniLM-L6-v2, an encoder.
    "minilm-l6": {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "hidden_act": "gelu",
        "vocab_size": 30522,
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "torch_dtype": "float32",
    },
    # Qwen3-Embedding-0.6B.
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "vocab_size": 151669,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "torch_dtype": "bfloat16",
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_act": "silu",
        "vocab_size": 102400,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 163840,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
        },
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

# A block head as published for this target: five layers, blocks of 16, without embedding and output matrix.
HEAD_SHAPES["qwen3-8b-dflash"] = {
    **SHAPES["qwen3-8b"],
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 5,
    "num_target_layers": 36,
    "dflash_config": {"block_size": 16, "mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
}

# The probability that the first i + 1 drafts are all accepted: vLLM's rates in its own measurements, continued past 3.
FORCED_RATES = (0.730, 0.521, 0.355, 0.245, 0.170, 0.118, 0.082)


def forced_rates(accepted_len: float, num_drafts: int) -> tuple[float, ...]:
    """p, p^2, ... with the p of which a step with so many drafts brings ``accepted_len`` tokens, its own included."""
    if not 1.0 <= accepted_len <= 1 + num_drafts:
        raise ConfigError(
            f"a step with {num_drafts} drafts brings from 1 to {1 + num_drafts} tokens, not {accepted_len}"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        is_low = 1 + sum(middle**i for i in range(1, num_drafts + 1)) < accepted_len
        low, high = (middle, high) if is_low else (low, middle)
    return tuple(high**i for i in range(1, num_drafts + 1))


def forced_drafts(method: str, shape: str, k: int, rates: Sequence[float] = FORCED_RATES) -> dict[str, Any]:
    """A ``speculative_config``: a head for that shape, drafts accepted at fixed rates. The text is meaningless."""
    return {
        "method": method,
        "model": f"{shape}-{method}",
        "num_speculative_tokens": k,
        "verify": "synthetic",
        "acceptance_rates": tuple(rates[:k]),
    }


def forced_eagle3(shape: str, k: int, rates: Sequence[float] = FORCED_RATES) -> dict[str, Any]:
    return forced_drafts("eagle3", shape, k, rates)


def weight_bytes(shape: str) -> int:
    """Bytes of the weights of a shape, or of a head, that one pass reads in 16 bits, without the embedding."""
    config = {**SHAPES, **HEAD_SHAPES}[shape]
    if "num_experts_per_tok" in config:
        raise ConfigError(f"which weights of {shape} a pass reads depends on the experts that its tokens choose")
    hidden: int = config["hidden_size"]
    vocab_size: int = config.get("draft_vocab_size", config["vocab_size"])
    block: dict[str, Any] = config.get("dflash_config", {})
    num_taps = len(block.get("target_layer_ids", ()))
    inputs = 2 if shape in HEAD_SHAPES and not block else 1  # the input of some heads is two concatenated states
    head_dim: int = config.get("head_dim", hidden // config["num_attention_heads"])
    q: int = head_dim * config["num_attention_heads"]
    kv: int = head_dim * config["num_key_value_heads"]
    mlp: int = 3 * hidden * config["intermediate_size"]
    layer = inputs * hidden * (q + 2 * kv) + q * hidden + mlp
    num_layers: int = config["num_hidden_layers"]
    return 2 * (num_layers * layer + num_taps * hidden * hidden + hidden * vocab_size)


def step_bytes(shape: str, k: int, method: str = "eagle3") -> int:
    """Bytes of all weights that a step reads: the target's once, and a head's for each of its passes."""
    if not k:
        return weight_bytes(shape)
    head = f"{shape}-{method}"
    if "dflash_config" in HEAD_SHAPES[head]:
        return weight_bytes(shape) + weight_bytes(head)  # one pass, and the target's output matrix again
    hidden: int = SHAPES[shape]["hidden_size"]
    mix = 2 * 3 * hidden * hidden  # of three taps, once per step
    return weight_bytes(shape) + mix + k * weight_bytes(head)


def shape_config(name: str) -> dict[str, Any]:
    if name not in SHAPES:
        raise ConfigError(f"unknown shape '{name}'{nearest(name, SHAPES)} (known: {', '.join(SHAPES)})")
    return SHAPES[name]
