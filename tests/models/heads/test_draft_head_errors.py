"""Draft heads that do not fit their target or are damaged: one line each, naming the tensor or the key."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.checkpoints.head_checkpoint import open_head_checkpoint
from slipstream.config import ModelConfig
from slipstream.errors import ModelError
from slipstream.models.heads.registry import read_head
from tests.models.heads.tiny_heads import BODY, CASES, TAPS, eagle_of_speculators, load, tiny_target


def says(text: str) -> Any:
    return pytest.raises(ModelError, match=re.escape(text))


CONFIG_ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": (
        {"architectures": ["LlamaForCausalLMEagle4"]},
        "'LlamaForCausalLMEagle4' is not that of a draft head; did you mean 'LlamaForCausalLMEagle'?",
    ),
    "the layer's name alone": ({"architectures": ["LlamaForCausalLM"]}, "'LlamaForCausalLM' is not that of a draft"),
    "no architecture": ({"architectures": None}, "architecture 'none named' is not that of a draft head"),
    "decoder layer": ({"model_type": "gpt2"}, "'model_type' of the head is 'gpt2'"),
    "hidden size": ({"hidden_size": 64}, "says 'hidden_size' 64, the target has 48"),
    "target's hidden size": ({"target_hidden_size": 64}, "says 'target_hidden_size' 64, the target has 48"),
    "draft vocabulary": ({"draft_vocab_size": 300}, "says 'draft_vocab_size' 300, more than the target's 272"),
    "vocabulary": ({"vocab_size": 300}, "says 'vocab_size' 300, more than the target's 272"),
    "tap": ({TAPS: [2, 5, 9]}, f"'{TAPS}' in the head's config.json taps the target after 9 layers, but it has 8"),
    "shifted tap": ({TAPS: [1, 5, 8]}, "taps the target after 9 layers"),
    "same taps": ({TAPS: [2, 2, 3]}, "must be different numbers of layers, not [2, 2, 3]"),
    "taps as text": ({TAPS: "2,4"}, "must be different numbers of layers, not '2,4'"),
    "number of taps": ({TAPS: [2, 4], "num_aux_hidden_states": 3}, "says 'num_aux_hidden_states' 3, but"),
    "unknown flag": (
        {"norm_after_fc": True},
        "'norm_after_fc' in the head's config.json is a variant that is not known",
    ),
    "misspelt flag": ({"norm_outputs": True}, "did you mean 'norm_output'?"),
    "flag of another type": ({"fc_norm": "yes"}, "'fc_norm' in the head's config.json must be true or false"),
    "unknown inner flag": ({"eagle_config": {"tree": 4}}, "'eagle_config.tree' in the head's config.json is a variant"),
    "inner flag": ({"eagle_config": {"use_last_layernorm": False}}, "'eagle_config.use_last_layernorm' in the head's"),
    "inner flags that are none": ({"eagle_config": [1]}, "'eagle_config' in the head's config.json must be an object"),
    "architecture that is no list": ({"architectures": 1}, "'architectures' in the head's config.json must be a list"),
    "decoder layer that is no name": ({"model_type": ["llama"]}, "'model_type' of the head is '['llama']'"),
    "size that is no number": ({"head_dim": "12"}, "config.json has no valid 'head_dim'"),
    "count that is no number": ({"num_key_value_heads": 1.5}, "config.json has no valid 'num_key_value_heads'"),
    "missing size": ({"intermediate_size": None}, "config.json has no valid 'intermediate_size'"),
    "speculators method": ({"speculators_model_type": "eagle2"}, "'speculators_model_type' is 'eagle2'"),
    "speculators layer": ({"speculators_model_type": "eagle3"}, "has no 'transformer_layer_config'"),
}


@pytest.mark.parametrize(("changes", "text"), CONFIG_ERRORS.values(), ids=list(CONFIG_ERRORS))
def test_a_config_that_does_not_fit(changes: dict[str, Any], text: str) -> None:
    target = tiny_target().model.config
    good = {"architectures": ["LlamaForCausalLMEagle3"], **BODY}
    read_head(good, target)
    with says(text) as error:
        read_head({**good, **changes}, target)
    assert "\n" not in str(error.value)


def test_falsy_flags_mean_nothing() -> None:
    head = {"architectures": ["LlamaForCausalLMEagle3"], **BODY, "norm_after_fc": False, "draft_tree": None}
    read_head(head, tiny_target().model.config)


def test_a_target_with_too_few_layers_for_the_usual_taps() -> None:
    few = replace(tiny_target().model.config, num_layers=4)
    with says(f"needs '{TAPS}' for a target of only 4 layers"):
        read_head({"architectures": ["LlamaForCausalLMEagle3"], **BODY}, few)


def test_other_kinds_of_config_errors() -> None:
    target: ModelConfig = tiny_target().model.config
    first: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle"], **BODY}
    with says("is that of a head for the method eagle, not for eagle3"):
        read_head(first, target, "eagle3")
    with says("says 'hidden_size' 64, the target has 48"):
        read_head({**first, "hidden_size": 64}, target)
    with says("says 'vocab_size' 100, the target has 272"):
        read_head({**first, "vocab_size": 100}, target)
    with says("'eagle_config.use_input_layernorm_in_first_layer' in the head's config.json is True; only False"):
        read_head({**first, "eagle_config": {"use_input_layernorm_in_first_layer": True}}, target)
    with says("'layernorms' in the head's config.json is a variant that is not known"):
        read_head({**eagle_of_speculators().config, "layernorms": True}, target)
    with says("has neither 'num_nextn_predict_layers' nor 'mtp_num_hidden_layers'"):
        read_head(tiny_target().config, target, "mtp")
    with says("'num_nextn_predict_layers' 0: this model brings no MTP layers"):
        read_head({**tiny_target().config, "num_nextn_predict_layers": 0}, target, "mtp")


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


MAPPED = "eagle3 of SpecForge"
TENSOR_ERRORS: dict[str, tuple[str, str, Tensor | None, str]] = {
    "missing fc": (MAPPED, "fc.weight", None, "lacks 1 tensors, among them 'fc.weight'"),
    "missing part": (MAPPED, "midlayer.self_attn.k_proj.weight", None, "'layers.0.self_attn.k_proj.weight'"),
    "missing output matrix": (MAPPED, "lm_head.weight", None, "among them 'lm_head.weight'"),
    "missing embedding": ("eagle3 of its own size, bin", "embed_tokens.weight", None, "'embed_tokens.weight'"),
    "missing norm": ("eagle3 of NVIDIA", "input_norm.weight", None, "among them 'input_norm.weight'"),
    "missing mapping": (MAPPED, "d2t", None, "lacks the tensor 'd2t', though it drafts 100 of the target's 272 tokens"),
    "unknown": (MAPPED, "mask_hidden", zeros(1, 48), "tensor 'mask_hidden' does not belong to LlamaForCausalLMEagle3"),
    "twice": (MAPPED, "model.fc.weight", zeros(48, 144), "tensor 'model.fc.weight' does not belong to"),
    "too few taps": (
        MAPPED,
        "fc.weight",
        zeros(48, 96),
        f"'fc.weight' has shape [48, 96], the config says [48, 144]: 3 taps ('{TAPS}') of the target's size 48",
    ),
    "fc of another target": (MAPPED, "fc.weight", zeros(48, 192), "'fc.weight' has shape [48, 192]"),
    "eagle's fc": ("eagle", "fc.weight", zeros(48, 112), "an embedding and a hidden state of the target's size 48"),
    "eagle's bias": ("eagle of speculators", "fusion_fc.bias", None, "among them 'fc.bias'"),
    "embedding": (MAPPED, "embed_tokens.weight", zeros(48, 100), "'embed_tokens.weight' has shape [48, 100]"),
    "output matrix": (MAPPED, "lm_head.weight", zeros(272, 48), "'lm_head.weight' has shape [272, 48]"),
    "length of d2t": (MAPPED, "d2t", torch.zeros(99).long(), "'d2t' has shape [99], the config says [100]"),
    "d2t too far": (MAPPED, "d2t", torch.full((100,), 200), "maps to tokens that the target, with 272, does not have"),
    "d2t below": (MAPPED, "d2t", torch.full((100,), -1), "maps to tokens that the target"),
    "d2t to one": (MAPPED, "d2t", -torch.arange(100), "maps two draft tokens to one"),
    "t2d of others": (MAPPED, "t2d", torch.arange(272) >= 172, "'t2d' does not mark the tokens that 'd2t' maps to"),
    "length of t2d": (MAPPED, "t2d", torch.ones(100).bool(), "'t2d' has shape [100], the config says [272]"),
    "mtp part": (
        "mtp of DeepSeek",
        "model.layers.8.eh_proj.weight",
        None,
        "among them 'model.layers.8.eh_proj.weight'",
    ),
    "mtp layer": (
        "mtp of Qwen3-Next",
        "mtp.layers.0.mlp.up_proj.weight",
        None,
        "among them 'mtp.layers.0.mlp.up_proj.weight'",
    ),
    "mtp of more layers": (
        "mtp of DeepSeek",
        "model.layers.9.enorm.weight",
        zeros(48),
        "'model.layers.9.enorm.weight'",
    ),
    "mtp with two heads": (
        "mtp of DeepSeek, three layers with all of their own",
        "model.layers.10.shared_head.head.weight",
        zeros(272, 48),
        "shared_head.head.weight' differs from that of another MTP layer",
    ),
}


@pytest.mark.parametrize(("name", "tensor", "value", "text"), TENSOR_ERRORS.values(), ids=list(TENSOR_ERRORS))
def test_weights_that_do_not_fit(name: str, tensor: str, value: Tensor | None, text: str, tmp_path: Path) -> None:
    case = CASES[name]()
    if value is None:
        del case.tensors[tensor]
    else:
        case.tensors[tensor] = value
    with says(text) as error:
        load(case, tmp_path)
    assert "\n" not in str(error.value)


class NotATensor:
    """What a careful reader of pickles does not make."""


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"not a pickle", "cannot be read"),
        ({"fc.weight": NotATensor()}, "cannot be read"),
        ({"fc.weight": 1.0}, "must hold tensors by name"),
        ([torch.zeros(1)], "must hold tensors by name"),
    ],
    ids=["text", "code", "number", "list"],
)
def test_bin_files_that_hold_something_else(content: Any, text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "pytorch_model.bin"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with says(text) as error:
        open_head_checkpoint(tmp_path)
    assert "\n" not in str(error.value)


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with says("is not the folder of a draft head"):
        open_head_checkpoint(tmp_path / "missing")
    (tmp_path / "config.json").write_text("{}")
    with says("holds no *.safetensors file"):
        open_head_checkpoint(tmp_path)
