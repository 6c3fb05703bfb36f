"""Tiny random checkpoints, written by ``transformers``, so that the expected values are not ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

VOCAB_SIZE = 272
EOS_ID = 257
CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    # Large enough that the most likely token changes from step to step.
    "initializer_range": 0.3,
    "bos_token_id": 256,
    "eos_token_id": EOS_ID,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    # The published values leave nothing between fast and slow in heads as small as these.
    "beta_fast": 8.0,
    "beta_slow": 0.5,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.0, 1.9, 5.5, 14.0],
    "original_max_position_embeddings": 16,
}
# Less than a prompt, so that it matters in prefill and in decoding.
_WINDOW: dict[str, Any] = {"sliding_window": 32}
_UPPER_WINDOWS: dict[str, Any] = {**_WINDOW, "use_sliding_window": True, "max_window_layers": 1}
_GEMMA3 = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_MIXTRAL = {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 40}
_QWEN3_MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "mlp_only_layers": [1],
    "norm_topk_prob": True,
}
_QWEN3_NEXT: dict[str, Any] = {
    # Norms of small states make rounding large where weights are.
    "initializer_range": 0.1,
    "num_hidden_layers": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "partial_rotary_factor": 0.5,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
_QWEN3_5: dict[str, Any] = {
    **{key: value for key, value in _QWEN3_NEXT.items() if "linear" in key or "layers" in key},
    # For text all three kinds of position are the same.
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}
_DEEPSEEK: dict[str, Any] = {
    # Latents leave little of a large state.
    "initializer_range": 0.15,
    "num_key_value_heads": 6,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
_DEEPSEEK_YARN = {**_YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 0.7}

VARIANTS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama-tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama-no-gqa": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 6}),
    "llama-biases": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "llama3.1-rope": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": _LLAMA3_ROPE}),
    "llama-linear-rope": (
        LlamaConfig,
        LlamaForCausalLM,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama-yarn-rope": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": _YARN_ROPE}),
    "llama-dynamic-rope": (
        LlamaConfig,
        LlamaForCausalLM,
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama-wide-heads": (LlamaConfig, LlamaForCausalLM, {"head_dim": 16}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen2-tied": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen2-window": (Qwen2Config, Qwen2ForCausalLM, _UPPER_WINDOWS),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "qwen3-wide-heads-bias": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32, "attention_bias": True}),
    "qwen3-window": (Qwen3Config, Qwen3ForCausalLM, {**_UPPER_WINDOWS, "max_window_layers": 2}),
    "mistral-window": (MistralConfig, MistralForCausalLM, {**_WINDOW, "head_dim": 16}),
    "mistral-no-window": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "mixtral": (MixtralConfig, MixtralForCausalLM, _MIXTRAL),
    "mixtral-window-tied": (MixtralConfig, MixtralForCausalLM, {**_MIXTRAL, **_WINDOW, "tie_word_embeddings": True}),
    "qwen3-moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, _QWEN3_MOE),
    "qwen3-moe-plain-weights": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {**_QWEN3_MOE, "norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": []},
    ),
    "qwen3-next": (Qwen3NextConfig, Qwen3NextForCausalLM, _QWEN3_NEXT),
    "qwen3-next-tied-dense-bias": (
        Qwen3NextConfig,
        Qwen3NextForCausalLM,
        {
            **_QWEN3_NEXT,
            "initializer_range": 0.2,
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
            "linear_conv_kernel_dim": 3,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "mlp_only_layers": [1, 3],
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
            "attention_bias": True,
        },
    ),
    "qwen3.5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM, {**_QWEN3_5, "initializer_range": 0.2}),
    "qwen3.5-moe": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, {**_QWEN3_NEXT, **_QWEN3_5}),
    "deepseek-v2": (
        DeepseekV2Config,
        DeepseekV2ForCausalLM,
        {**_DEEPSEEK, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek-v2-lite": (
        DeepseekV2Config,
        DeepseekV2ForCausalLM,
        {**_DEEPSEEK, "q_lora_rank": None, "topk_method": "greedy", "rope_parameters": _DEEPSEEK_YARN},
    ),
    "deepseek-v3": (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        {**_DEEPSEEK, "n_group": 4, "topk_group": 2, "num_mtp_layers": 0, "rope_parameters": _DEEPSEEK_YARN},
    ),
    "deepseek-v3-bias-halves-dense": (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        {
            **_DEEPSEEK,
            "n_group": 1,
            "topk_group": 1,
            "num_mtp_layers": 0,
            "attention_bias": True,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "first_k_dense_replace": 2,
            "initializer_range": 0.25,
        },
    ),
    "deepseek-v3.2": (
        DeepseekV32Config,
        DeepseekV32ForCausalLM,
        {
            **_DEEPSEEK,
            "n_group": 4,
            "topk_group": 2,
            "index_topk": 24,
            # Few heads are all silent for many keys, whose scores are then equal: any of those might be chosen.
            "index_n_heads": 16,
            "index_head_dim": 12,
            "rope_parameters": _DEEPSEEK_YARN,
        },
    ),
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        # Embeddings are scaled up and are the head as well; larger ones would repeat the last token forever.
        {**_GEMMA3, "query_pre_attn_scalar": 20, "initializer_range": 0.05},
    ),
    "gemma3-untied-no-gqa-linear-rope": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {
            **_GEMMA3,
            "tie_word_embeddings": False,
            "num_key_value_heads": 6,
            "attention_bias": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": (Phi3Config, Phi3ForCausalLM, {"pad_token_id": 0}),
    "phi3-window-partial-rotary-tied": (
        Phi3Config,
        Phi3ForCausalLM,
        {**_WINDOW, "pad_token_id": 0, "partial_rotary_factor": 0.5, "tie_word_embeddings": True},
    ),
    "phi3-longrope": (
        Phi3Config,
        Phi3ForCausalLM,
        {"pad_token_id": 0, "rope_parameters": _LONGROPE, "original_max_position_embeddings": 16},
    ),
}


def build(variant: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model of the variant with every parameter random, norms and biases included."""
    config_class, model_class, differences = VARIANTS[variant]
    config = config_class(**{**_SHAPE, **differences, **changes})
    torch.manual_seed(seed)
    model: PreTrainedModel = model_class(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
                if variant.startswith(("qwen3-next", "qwen3.5")) and ".linear_attn." not in name:
                    parameter -= 1  # stored as what one is to be added to
            elif name.endswith("A_log"):
                # In float32 transformers loses digits where much is forgotten at once, and we would be told so.
                parameter.uniform_(-3, 1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.3)
    return model.eval()


def save(model: PreTrainedModel, folder: Path, **kwargs: Any) -> Path:
    """The model and a byte-level tokenizer in Hugging Face layout."""
    model.save_pretrained(folder, **kwargs)
    (folder / "generation_config.json").unlink(missing_ok=True)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"bos_token": "<s>", "eos_token": "</s>", "chat_template": ' + json.dumps(CHAT_TEMPLATE) + "}"
    )
