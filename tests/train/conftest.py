"""A tiny target whose next token mostly depends on the last one, so that a head can learn it in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.checkpoints.checkpoint import open_checkpoint
from slipstream.cli import main
from slipstream.train.target import TargetModel, load_target
from tests import tiny_models

OPTIONS: dict[str, Any] = {
    "sequences": 64,
    "max_len": 224,
    "draft_vocab": 200,
    "draft_steps": 3,
    "steps": 100,
    "batch_tokens": 1024,
    "checkpoint_every": 50,
    "lr": 1e-2,
}


def build_target(num_layers: int = 7, **changes: Any) -> Any:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, **changes}
    model = tiny_models.build("llama", num_hidden_layers=num_layers, initializer_range=0.08, **shape)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(0, 1.0, generator=generator)
        model.get_output_embeddings().weight.normal_(0, 0.7, generator=generator)
    return model


def arguments(target: Path, out: Path, **changes: Any) -> list[str]:
    """Arguments of the command line."""
    options = {"model": target, "out": out, **OPTIONS, **changes}
    return ["train", "eagle3", *(f"--{name.replace('_', '-')}={value}" for name, value in options.items())]


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(build_target(), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def trained(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a head that was trained by the command."""
    out = tmp_path_factory.mktemp("head")
    assert main(arguments(target, out)) == 0
    return out


TAPS = (2, 3, 4)


def open_target_model(target: Path, dtype: str = "float64") -> TargetModel:
    return load_target(target, open_checkpoint(target), TAPS, "cpu", dtype)
