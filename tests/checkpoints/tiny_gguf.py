"""Tiny GGUF files for tests, written by the ``gguf`` package and the rules of llama.cpp's converter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGUFWriter

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP, CONTEXT = 64, 2, 4, 2, 32, 96, 512

_HF_TO_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def random_state(arch: str, vocab_size: int, seed: int = 0, tied: bool = False) -> dict[str, torch.Tensor]:
    """Random weights under Hugging Face's names, shaped for ``arch``."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    state = {"model.embed_tokens.weight": draw(vocab_size, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        sizes = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
        for name, rows in sizes.items():
            state[f"{prefix}self_attn.{name}_proj.weight"] = draw(rows, HIDDEN)
            if arch == "qwen2":
                state[f"{prefix}self_attn.{name}_proj.bias"] = draw(rows)
        if arch == "qwen3":
            state[prefix + "self_attn.q_norm.weight"] = draw(HEAD_DIM)
            state[prefix + "self_attn.k_norm.weight"] = draw(HEAD_DIM)
        state[prefix + "self_attn.o_proj.weight"] = draw(HIDDEN, HEADS * HEAD_DIM)
        state[prefix + "mlp.gate_proj.weight"] = draw(MLP, HIDDEN)
        state[prefix + "mlp.up_proj.weight"] = draw(MLP, HIDDEN)
        state[prefix + "mlp.down_proj.weight"] = draw(HIDDEN, MLP)
        state[prefix + "input_layernorm.weight"] = draw(HIDDEN)
        state[prefix + "post_attention_layernorm.weight"] = draw(HIDDEN)
    state["model.norm.weight"] = draw(HIDDEN)
    if not tied:
        state["lm_head.weight"] = draw(vocab_size, HIDDEN)
    return state


def gguf_name(name: str) -> str:
    stem, suffix = name.rsplit(".", 1)
    if stem in _HF_TO_GGUF:
        return f"{_HF_TO_GGUF[stem]}.{suffix}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{_HF_TO_GGUF[inner]}.{suffix}"


def permuted_for_llama(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Row i of a head's first half and of its second half become neighbours, written out row by row."""
    head_dim = weight.shape[0] // num_heads
    order = [
        head * head_dim + half * (head_dim // 2) + idx
        for head in range(num_heads)
        for idx in range(head_dim // 2)
        for half in range(2)
    ]
    return weight[order]


def write_model(
    path: Path,
    arch: str,
    state: dict[str, torch.Tensor],
    *,
    quantise: dict[str, gguf.GGMLQuantizationType] | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
    raw_tensors: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
    extra_metadata: dict[str, Any] | None = None,
    tokenizer: dict[str, Any] | None = None,
) -> Path:
    """``quantise`` maps Hugging Face names to an encoding; everything else is stored as it is.

    ``raw_tensors`` are encoded already, ``extra_tensors`` plain; both have the file's own names.
    """
    writer = GGUFWriter(path, arch)
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    for key, value in (extra_metadata or {}).items():
        _add(writer, key, value)
    for key, value in (tokenizer or {}).items():
        _add(writer, f"tokenizer.{key}", value)
    for name, tensor in state.items():
        _add_tensor(writer, arch, name, tensor, (quantise or {}).get(name))
    for name, array in (extra_tensors or {}).items():
        writer.add_tensor(name, array)
    for name, (array, kind) in (raw_tensors or {}).items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def sentencepiece_tokenizer() -> dict[str, Any]:
    """Metadata of 278 tokens: a few pieces, and every byte."""
    pieces = ["▁", *"abcdehlort", "he", "ll", "hell", "hello", "▁hello", "th", "the", "▁the"]
    return {
        "ggml.model": "llama",
        "ggml.pre": "default",
        "ggml.tokens": ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces],
        "ggml.scores": [0.0] * 259 + [-float(idx) for idx in range(len(pieces))],
        "ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces)],
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
        "ggml.add_bos_token": True,
        "ggml.add_space_prefix": True,
    }


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        writer.add_float32(key, value)


def _add_tensor(
    writer: GGUFWriter, arch: str, name: str, tensor: torch.Tensor, kind: gguf.GGMLQuantizationType | None
) -> None:
    if tensor.dtype == torch.bfloat16:
        array, kind = tensor.view(torch.uint16).numpy(), gguf.GGMLQuantizationType.BF16
    else:
        array = tensor.numpy()
    if arch == "llama" and ".q_proj." in name:
        array = permuted_for_llama(array, HEADS)
    if arch == "llama" and ".k_proj." in name:
        array = permuted_for_llama(array, KV_HEADS)
    if kind is None:
        writer.add_tensor(gguf_name(name), array)
    elif kind == gguf.GGMLQuantizationType.BF16:
        # The writer counts raw bytes, so a row of n values is 2n of them.
        writer.add_tensor(gguf_name(name), array.view(np.uint8), raw_dtype=kind)
    else:
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(array, kind), raw_dtype=kind)
