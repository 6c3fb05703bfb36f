"""Heads as files: the config that says what the network is, and the tensors, in two formats.

Every flag is written out. Formats differ in what a missing one means, and a wrong guess only lowers acceptance.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from slipstream.config import ModelConfig
from slipstream.errors import ConfigError
from slipstream.models.heads.network import HeadPlan
from slipstream.models.heads.registry import read_head
from slipstream.train.head import TrainableHead
from slipstream.train.vocabulary import DraftVocabulary

_TAPS = "eagle_aux_hidden_state_layer_ids"
_LEAST_LAYERS = 7
_FLAGS = {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False}


def default_taps(target: ModelConfig) -> tuple[int, ...]:
    """The layers after which the target is tapped: the defaults of every engine."""
    layers = target.num_layers
    if layers < _LEAST_LAYERS:
        raise ConfigError(
            f"the model has {layers} layers; an EAGLE-3 head taps three different ones, after 2, half and all but 3, "
            f"which takes at least {_LEAST_LAYERS}"
        )
    return 2, layers // 2, layers - 3


def plan_head(target: ModelConfig, draft_vocab: int, dtype: torch.dtype) -> HeadPlan:
    """The network to train, read from the config that will be written, so that it equals the network that is run."""
    return read_head(plain_config(target, draft_vocab, dtype), target, "eagle3")


def plain_config(target: ModelConfig, draft_vocab: int, dtype: torch.dtype) -> dict[str, Any]:
    """The config as written by EAGLE, SpecForge and NVIDIA."""
    taps = default_taps(target)
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer_config(target, dtype),
        "draft_vocab_size": draft_vocab,
        "target_hidden_size": target.hidden_size,
        **_FLAGS,
        # vLLM reads the ids at the top level and counts the layers before the tap; SGLang reads those in
        # eagle_config and gives the index of the layer whose output is tapped.
        _TAPS: list(taps),
        "eagle_config": {"use_aux_hidden_state": True, _TAPS: [tap - 1 for tap in taps]},
    }


def speculators_config(
    target: ModelConfig, draft_vocab: int, dtype: torch.dtype, verifier: str, num_drafts: int
) -> dict[str, Any]:
    """The config as written by the ``speculators`` library, for vLLM."""
    return {
        "architectures": ["Eagle3Speculator"],
        "model_type": "speculators",
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": num_drafts,
                    "accept_tolerance": 0.0,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"name_or_path": verifier, "architectures": [target.architecture]},
        },
        "transformer_layer_config": layer_config(target, dtype),
        "draft_vocab_size": draft_vocab,
        "target_hidden_size": None,  # the head's own size
        "has_no_defaults_at_init": False,
        **_FLAGS,
        _TAPS: list(default_taps(target)),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": _name(dtype),
    }


def layer_config(target: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """One Llama layer of the target's size. Its rope is the default one, even if the target scales its own."""
    return {
        "model_type": "llama",
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": target.max_position,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": target.rope.theta,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "use_cache": True,
        "pretraining_tp": 1,
        "torch_dtype": _name(dtype),
    }


def write_head(
    folder: Path,
    head: TrainableHead,
    vocabulary: DraftVocabulary,
    target: ModelConfig,
    *,
    format: str,  # noqa: A002 - the option's name
    dtype: torch.dtype,
    verifier: str,
    num_drafts: int,
) -> Path:
    """config.json and model.safetensors; the embedding is the target's and is left out."""
    size = len(vocabulary.target_ids)
    tensors = {name: value.detach().to("cpu", dtype).contiguous() for name, value in head.state_dict().items()}
    if format == "speculators":
        config = speculators_config(target, size, dtype, verifier, num_drafts)
        tensors = {name.replace("midlayer.", "layers.0.", 1): value for name, value in tensors.items()}
    else:
        config = plain_config(target, size, dtype)
    maps: dict[str, Tensor] = {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}
    return write_files(folder, {**tensors, **maps}, config)


def write_files(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    """The weights first: a folder with a config is complete."""
    half = folder / "model.half"
    save_file(tensors, half, metadata={"format": "pt"})
    half.chmod(0o644)  # safetensors makes the file private; other users may serve the head
    half.replace(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
