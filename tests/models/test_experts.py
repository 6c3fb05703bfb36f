"""Experts of a checkpoint in every layout they are stored in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from slipstream.checkpoints.hf_config import read_experts
from slipstream.config import EngineOptions, ModelConfig, RopeConfig
from slipstream.engine.build import build_engine
from slipstream.errors import ModelError
from slipstream.models.experts import Experts, split_experts
from slipstream.models.layers import checkpoint_slots, finish_weights, open_weights
from slipstream.weights.dense import Dense
from tests import tiny_models

from .test_parity import all_logits

ONE_BY_ONE = {
    "mixtral": "model.layers.0.block_sparse_moe.experts.3.w1.weight",
    "qwen3-moe": "model.layers.0.mlp.experts.3.gate_proj.weight",
}


@pytest.mark.parametrize("variant", ONE_BY_ONE)
@pytest.mark.parametrize("published", [True, False])
def test_stacked_or_one_by_one(tmp_path: Path, variant: str, published: bool) -> None:
    reference = tiny_models.build(variant)
    tiny_models.save(reference, tmp_path, save_original_format=published)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert (ONE_BY_ONE[variant] in names) is published
    assert ("model.layers.0.mlp.experts.gate_up_proj" in names) is not published
    prompt = torch.arange(0, 90).unsqueeze(0)
    with torch.inference_mode():
        expected = reference(prompt).logits[0]
    engine = build_engine(EngineOptions(model=str(tmp_path), dtype="float32"))
    torch.testing.assert_close(all_logits(engine, prompt[0].tolist()), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("published", "name", "shape", "message"),
    [
        (True, "model.layers.0.mlp.experts.3.gate_proj.weight", None, "lacks 1 tensors.*experts.3.gate_proj"),
        (True, "model.layers.0.mlp.experts.3.up_proj.weight", (25, 48), r"experts.3.up_proj.*\[25, 48\].*\[24, 48\]"),
        (True, "model.layers.0.mlp.experts.6.up_proj.weight", (24, 48), "experts.6.up_proj.*does not belong"),
        (False, "model.layers.0.mlp.experts.gate_up_proj", (5, 48, 48), "5, 48, 48.*6 experts of size 24"),
        (False, "model.layers.0.mlp.experts.gate_up_proj", (6, 50, 48), "6, 50, 48.*6 experts of size 24"),
        (False, "model.layers.0.mlp.experts.down_proj", (6, 48), "6, 48.*6 experts of size 24"),
        (False, "model.layers.0.mlp.experts.down_proj", (6, 48, 20), r"experts.0.down_proj.*\[48, 20\]"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    tmp_path: Path, published: bool, name: str, shape: tuple[int, ...] | None, message: str
) -> None:
    tiny_models.save(tiny_models.build("qwen3-moe"), tmp_path, save_original_format=published)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    if shape is None:
        del tensors[name]
    else:
        tensors[name] = torch.zeros(shape)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=message):
        build_engine(EngineOptions(model=str(tmp_path), dtype="float32"))


_SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "n_routed_experts": 12,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 6,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "hidden_act": "silu",
}
_GROUPS: dict[str, Any] = {"num_groups": 4, "num_kept_groups": 2, "scale": 2.5, "wide_logits": True}


def build_layer(hf: dict[str, Any], **routing: Any) -> Experts:
    experts = read_experts(hf, hf["moe_intermediate_size"], [0], 2 * hf["moe_intermediate_size"], **routing)
    rope = RopeConfig(rotary_dim=8)
    config = ModelConfig("", 1, hf["hidden_size"], 1, 1, 2, 2, 8, 1e-6, 1, rope, experts=experts)
    made = Experts(config)
    open_weights(made, Dense())
    return made


@torch.inference_mode()
@pytest.mark.parametrize(("kind", "renormalise"), [("softmax", False), ("sigmoid", False), ("sigmoid", True)])
def test_shared_experts_and_groups(kind: str, renormalise: bool) -> None:
    """The layer's output, from weights that are found by their published names."""
    reference: nn.Module
    if kind == "sigmoid":
        reference = DeepseekV3MoE(DeepseekV3Config(**_SIZES, norm_topk_prob=renormalise))
        routing = {**_GROUPS, "scoring": "sigmoid", "has_bias": True, "group_score": "top2", "renormalise": renormalise}
    else:
        reference = DeepseekV2Moe(DeepseekV2Config(**_SIZES, topk_method="group_limited_greedy"))
        routing = _GROUPS
    layer = build_layer(_SIZES, **routing)
    slots = dict(checkpoint_slots(nn.ModuleDict({"mlp": layer})))
    assert layer.config.shared_size == 12
    for name, tensor in reference.state_dict().items():
        nn.init.normal_(tensor, std=0.3)
        for own, part in split_experts(f"mlp.{name}", tensor, layer.config):
            slot = slots.pop(own)
            assert isinstance(slot, torch.Tensor)
            slot.copy_(part)
    assert not slots
    finish_weights(layer, torch.device("cpu"))
    x = torch.randn(40, 16)
    torch.testing.assert_close(layer(x), reference(x.unsqueeze(0))[0], rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_biases_keep_their_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """What experts are chosen by is not rounded to 16 bits: a bias, and logits where the routing says so."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = build_layer(_SIZES, scoring="sigmoid", has_bias=True, wide_logits=True)
        plain = build_layer(_SIZES)
    finally:
        torch.set_default_dtype(before)
    assert layer.correction_bias is not None
    assert layer.correction_bias.dtype == torch.float32
    seen: list[torch.dtype] = []

    def note(logits: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(logits.dtype)
        return torch.ones(3, 1), torch.zeros(3, 1, dtype=torch.int64)

    monkeypatch.setattr("slipstream.models.experts.route_tokens", note)
    for each in (layer, plain):
        each(torch.zeros(3, 16, dtype=torch.bfloat16))
    assert seen == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(
    ("values", "routing", "message"),
    [
        ({"num_experts_per_tok": 13}, {}, "gives a token 13 of 12 experts"),
        ({}, {"num_groups": 2, "num_kept_groups": 3}, "keeps 3 of 2 groups"),
        ({}, {"num_groups": 5, "num_kept_groups": 2}, "12 experts in 5 groups of one size"),
        ({}, {"num_groups": 12, "num_kept_groups": 2}, "12 experts in 12 groups of one size"),
        ({}, {"num_groups": 4, "num_kept_groups": 1}, "4 experts of 1 groups of 3, which are too few"),
        ({"n_routed_experts": None}, {}, "no valid 'n_routed_experts'"),
    ],
)
def test_routing_that_cannot_be_is_one_line(values: dict[str, Any], routing: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_experts({**_SIZES, **values}, 6, [0], **routing)
