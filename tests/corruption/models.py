"""The tiny models that are damaged: each format, tokenizer and kind of draft head, written as their publishers do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file, save_file

from tests import tiny_models
from tests.checkpoints import test_gguf_architectures as converted_models
from tests.checkpoints.tiny_gguf import random_state, sentencepiece_tokenizer, write_model
from tests.corruption.tokenizers import tiny_tokenizers
from tests.models.heads.tiny_heads import TAPS, eagle, eagle3, eagle_of_speculators

_LONG = {"max_position_embeddings": 512}


def write_models(folder: Path) -> None:
    """One folder or GGUF file for each name in ``cases.MODELS``, and the heads beside them."""
    for name, variant in (
        ("llama", "llama3.1-rope"),
        ("yarn", "llama-yarn-rope"),
        ("dynamic", "llama-dynamic-rope"),
        ("qwen2", "qwen2-window"),
        ("gemma3", "gemma3"),
        ("phi3", "phi3-longrope"),
        ("qwen3-next", "qwen3-next"),
    ):
        _complete(tiny_models.save(tiny_models.build(variant), folder / name))
    for name, tokenizer in tiny_tokenizers().items():
        own = shutil.copytree(folder / "llama", folder / f"llama-{name}")
        tokenizer.save(str(own / "tokenizer.json"))
    tiny_models.save(tiny_models.build("qwen3-moe"), folder / "qwen3-moe", max_shard_size="60KB")
    mtp = tiny_models.save(tiny_models.build("llama"), folder / "mtp")
    _add_mtp(mtp)
    eagle3({TAPS: [0, 1, 2]}, body=_LONG).write(_new(folder / "eagle3-head"))
    head = eagle(_LONG)
    head.bin = True
    head.write(_new(folder / "eagle-head"))
    speculators = eagle_of_speculators()
    speculators.config["transformer_layer_config"] = {**speculators.config["transformer_layer_config"], **_LONG}
    speculators.write(_new(folder / "speculators-head"))
    _write_ggufs(folder)


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _complete(folder: Path) -> None:
    """Files that published models have and the tiny ones lack."""
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config["chat_template"] = [{"name": "default", "template": config["chat_template"]}]
    config["added_tokens_decoder"] = {
        "256": {"content": "<s>", "special": True, "lstrip": False},
        "258": {"content": "<tool>", "special": False, "normalized": True},
    }
    file.write_text(json.dumps(config))
    names = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "unk_token": None}
    (folder / "special_tokens_map.json").write_text(json.dumps(names))
    generation = {"eos_token_id": [257, 256], "bos_token_id": 256, "do_sample": True, "temperature": 0.8, "top_k": 20}
    (folder / "generation_config.json").write_text(json.dumps({**generation, "top_p": 0.9, "repetition_penalty": 1.1}))


def _add_mtp(folder: Path) -> None:
    """A layer as DeepSeek's, with the weights of one of the model's own."""
    tensors = load_file(folder / "model.safetensors")
    prefix, size = "model.layers.3.", 48
    for name in [name for name in tensors if name.startswith("model.layers.2.")]:
        tensors[name.replace("model.layers.2.", prefix)] = tensors[name].clone()
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{prefix}{name}.weight"] = torch.ones(size)
    tensors[f"{prefix}eh_proj.weight"] = torch.randn(size, 2 * size)
    save_file(tensors, folder / "model.safetensors")
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_nextn_predict_layers": 1}))


def _write_ggufs(folder: Path) -> None:
    state = random_state("llama", 300)
    q8 = dict.fromkeys([name for name in state if "proj" in name], gguf.GGMLQuantizationType.Q8_0)
    metadata = {
        "general.alignment": 32,
        "llama.rope.dimension_count": 32,
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 2.0,
        "llama.rope.scaling.original_context_length": 256,
    }
    tokenizer = {**sentencepiece_tokenizer(), "chat_template": tiny_models.CHAT_TEMPLATE}
    path = folder / "llama.gguf"
    write_model(path, "llama", state, quantise=q8, extra_metadata=metadata, tokenizer=tokenizer)
    write_model(folder / "qwen3.gguf", "qwen3", random_state("qwen3", 300), tokenizer=_byte_level())
    for name in ("mixtral", "gemma3", "phi3-longrope"):
        case = converted_models.CASES[name]
        model = tiny_models.build(case.variant, **case.changes)
        tensors = {**dict(converted_models.converted(model, case.arch)), **converted_models.factor_tensors(case)}
        converted_models.write(folder / f"{name}.gguf", case.arch, model, case.metadata, tensors)


def _byte_level() -> dict[str, Any]:
    alphabet = sorted(tiny_models.pre_tokenizers.ByteLevel.alphabet())
    return {
        "ggml.model": "gpt2",
        "ggml.pre": "qwen2",
        "ggml.tokens": [*alphabet, "he", "ll", "hell", "<|im_end|>", "<|tool|>"],
        "ggml.token_type": [1] * (len(alphabet) + 3) + [3, 4],
        "ggml.merges": ["h e", "l l", "he ll"],
        "ggml.eos_token_id": len(alphabet) + 3,
        "ggml.padding_token_id": len(alphabet) + 3,
        "ggml.add_bos_token": False,
    }
