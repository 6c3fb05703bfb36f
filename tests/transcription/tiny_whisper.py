"""A tiny random Whisper with a tokenizer of bytes, in the folders of ``transformers`` and of CTranslate2."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration

LANGUAGES = ("en", "de", "fr")
END, START = 256, 257
FIRST_LANGUAGE = START + 1
_SPECIAL = [
    *("<|endoftext|>", "<|startoftranscript|>"),
    *(f"<|{language}|>" for language in LANGUAGES),
    *("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
]
NO_TIMESTAMPS = END + len(_SPECIAL) - 1
FIRST_TIMESTAMP = NO_TIMESTAMPS + 1
VOCAB_SIZE = FIRST_TIMESTAMP + 1501
SUPPRESSED, SUPPRESSED_AT_BEGIN = [1, 2, 7, START, FIRST_LANGUAGE], [32, END]


def make_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: idx for idx, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in _SPECIAL])
    return tokenizer


def make_model(seed: int = 0, **changes: Any) -> WhisperForConditionalGeneration:
    torch.manual_seed(seed)
    config = {
        "vocab_size": VOCAB_SIZE,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 40,
        "num_mel_bins": 80,
        # Large enough that the most likely token changes from step to step.
        "init_std": 0.3,
        "pad_token_id": END,
        "bos_token_id": END,
        "eos_token_id": END,
        "decoder_start_token_id": START,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
        "dtype": torch.float32,
        **changes,
    }
    return WhisperForConditionalGeneration(WhisperConfig(**config)).eval()


def save_folder(folder: Path, model: WhisperForConditionalGeneration) -> None:
    """As Hugging Face has it."""
    model.generation_config = GenerationConfig(
        eos_token_id=END,
        decoder_start_token_id=START,
        suppress_tokens=SUPPRESSED,
        begin_suppress_tokens=SUPPRESSED_AT_BEGIN,
    )
    model.save_pretrained(folder)
    make_tokenizer().save(str(folder / "tokenizer.json"))


# --- CTranslate2's folder, by its published format

_TYPE_IDS = {torch.float32: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.float16: 4, torch.bfloat16: 5}


def save_ctranslate2(folder: Path, model: WhisperForConditionalGeneration, dtype: torch.dtype = torch.float32) -> None:
    config, state = model.config, dict(model.model.state_dict())
    variables: dict[str, torch.Tensor] = {
        "encoder/num_heads": torch.tensor(config.encoder_attention_heads, dtype=torch.int16),
        "decoder/num_heads": torch.tensor(config.decoder_attention_heads, dtype=torch.int16),
        "decoder/activation": torch.tensor(3, dtype=torch.int8),
        "decoder/scale_embeddings": torch.tensor(0, dtype=torch.int8),
        "decoder/embeddings/weight": state["decoder.embed_tokens.weight"],
    }
    for stack, num_layers in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        variables[f"{stack}/position_encodings/encodings"] = state[f"{stack}.embed_positions.weight"]
        variables |= _norm(f"{stack}/layer_norm", state, f"{stack}.layer_norm")
        for idx in range(num_layers):
            variables |= _layer(f"{stack}/layer_{idx}/", state, f"{stack}.layers.{idx}.")
    for conv in ("conv1", "conv2"):
        for part in ("weight", "bias"):
            variables[f"encoder/{conv}/{part}"] = state[f"encoder.{conv}.{part}"]
    stored = {name: part for own, tensor in variables.items() for name, part in _store(own, tensor, dtype).items()}
    aliases = {"decoder/projection/weight": "decoder/embeddings/weight"}
    if dtype is torch.int8:
        aliases["decoder/projection/weight_scale"] = "decoder/embeddings/weight_scale"
    folder.mkdir(exist_ok=True)
    (folder / "model.bin").write_bytes(write_file(stored, aliases))
    own_config = {"suppress_ids": SUPPRESSED, "suppress_ids_begin": SUPPRESSED_AT_BEGIN}
    (folder / "config.json").write_text(json.dumps(own_config))
    make_tokenizer().save(str(folder / "tokenizer.json"))


def write_file(variables: Mapping[str, torch.Tensor], aliases: Mapping[str, str], spec: str = "WhisperSpec") -> bytes:
    parts = [struct.pack("<I", 6), _text(spec), struct.pack("<II", 3, len(variables))]
    for name, tensor in variables.items():
        data = tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else tensor.numpy().tobytes()
        shape = struct.pack(f"<B{tensor.dim()}I", tensor.dim(), *tensor.shape)
        parts += [_text(name), shape, struct.pack("<BI", _TYPE_IDS[tensor.dtype], len(data)), data]
    parts += [struct.pack("<I", len(aliases)), *(_text(alias) + _text(name) for alias, name in aliases.items())]
    return b"".join(parts)


def _text(text: str) -> bytes:
    return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"


def _store(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Matrices in the type asked for; of integers, the largest number of each row is 127."""
    if not tensor.is_floating_point():
        return {name: tensor}
    if dtype is not torch.int8:
        return {name: tensor.to(dtype)}
    if tensor.dim() != 2 or "position" in name:
        return {name: tensor}
    scale = 127.0 / tensor.abs().amax(1)
    return {name: (tensor * scale[:, None]).round().to(torch.int8), f"{name}_scale": scale}


def _norm(own: str, state: Mapping[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {f"{own}/gamma": state[f"{name}.weight"], f"{own}/beta": state[f"{name}.bias"]}


def _layer(own: str, state: Mapping[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    found = _norm(f"{own}self_attention/layer_norm", state, f"{name}self_attn_layer_norm")
    found |= _norm(f"{own}ffn/layer_norm", state, f"{name}final_layer_norm")
    products = {
        "self_attention/linear_0": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "self_attention/linear_1": ["self_attn.out_proj"],
        "ffn/linear_0": ["fc1"],
        "ffn/linear_1": ["fc2"],
    }
    if f"{name}encoder_attn.q_proj.weight" in state:
        found |= _norm(f"{own}attention/layer_norm", state, f"{name}encoder_attn_layer_norm")
        products |= {
            "attention/linear_0": ["encoder_attn.q_proj"],
            "attention/linear_1": ["encoder_attn.k_proj", "encoder_attn.v_proj"],
            "attention/linear_2": ["encoder_attn.out_proj"],
        }
    for product, parts in products.items():
        found[f"{own}{product}/weight"] = torch.cat([state[f"{name}{part}.weight"] for part in parts])
        rows = state[f"{name}{parts[0]}.weight"].shape[0]
        biases = [state.get(f"{name}{part}.bias", torch.zeros(rows)) for part in parts]
        found[f"{own}{product}/bias"] = torch.cat(biases)
    return found


def as_features(seed: int, num_bands: int = 80) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal((num_bands, 3000)).astype(np.float32)
