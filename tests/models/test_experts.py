"""Experts of a checkpoint in every layout they are stored in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.config import EngineOptions
from slipstream.engine.build import build_engine
from slipstream.errors import ModelError
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
