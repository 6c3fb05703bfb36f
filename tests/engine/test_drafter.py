"""What drafts is counted before anything is allocated: its weights, those that a file may leave out included."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.checkpoints.checkpoint import open_checkpoint
from slipstream.config import EngineOptions, NetworkSize
from slipstream.models.load import Placement
from slipstream.speculate.method import TargetFiles
from slipstream.speculate.options import read_speculation
from slipstream.speculate.registry import find_method
from tests import tiny_models
from tests.models.heads import tiny_heads
from tests.models.heads.tiny_heads import HIDDEN, NUM_LAYERS, VOCAB, Case

LONG = {"max_position_embeddings": 512}
BOTH = {"embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
# A head, and how many weights of it a file may leave out but this one has.
HEADS: dict[str, tuple[str, Callable[[], Case], int]] = {
    "eagle": ("eagle", lambda: tiny_heads.eagle(LONG), 0),
    "eagle, bin": (
        "eagle",
        lambda: tiny_heads.eagle(LONG, extra=BOTH | {"fc.bias": (HIDDEN,)}, bin=True),
        2 * VOCAB * HIDDEN + HIDDEN,
    ),
    "eagle3": ("eagle3", lambda: tiny_heads.eagle3(body=LONG), 0),
    "eagle3, own embedding": (
        "eagle3",
        lambda: tiny_heads.eagle3(body=LONG, extra=tiny_heads.OWN_EMBEDDING),
        VOCAB * HIDDEN,
    ),
    "mtp": ("mtp", functools.partial(tiny_heads.deepseek, 1), 0),
    "mtp, own matrices": ("mtp", functools.partial(tiny_heads.deepseek, 2, own=True), 2 * VOCAB * HIDDEN),
}


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_models.build("llama", num_hidden_layers=NUM_LAYERS)
    return tiny_models.save(model, tmp_path_factory.mktemp("target"))


def options_of(name: str, target: Path, folder: Path) -> EngineOptions:
    """The head written beside the target, or its layers into a copy of it."""
    method, make, _ = HEADS[name]
    case = make()
    speculative: dict[str, Any] = {"method": method}
    if method == "mtp":
        case.config |= json.loads((target / "config.json").read_text())
        case.write(folder)
        own = {name: tensor.float() for name, tensor in case.tensors.items()}
        save_file(load_file(target / "model.safetensors") | own, folder / "model.safetensors")
        tiny_models.write_tokenizer(folder)
        target = folder
    else:
        speculative["model"] = str(case.write(folder))
    return EngineOptions(model=str(target), dtype="float64", device="cpu", speculative_config=speculative)


@pytest.mark.parametrize("name", HEADS)
def test_what_the_file_brings_is_counted(name: str, target: Path, tmp_path: Path) -> None:
    method, make, num_optional = HEADS[name]
    options = options_of(name, target, tmp_path)
    checkpoint = open_checkpoint(Path(options.model))
    placement = Placement(torch.device("cpu"), torch.float64)
    files = TargetFiles(checkpoint.config, checkpoint, checkpoint.tokenizer(), placement)
    speculative = read_speculation(options)
    assert speculative is not None
    drafter = find_method(method).open(speculative, files)
    assert drafter.model is not None
    may_miss = (
        "embed_tokens.weight",
        "fc.bias",
        "shared_head.head.weight",
        *(["lm_head.weight"] * (method == "eagle")),
    )
    needed = [t.numel() for key, t in make().tensors.items() if not key.endswith((*may_miss, "d2t", "t2d"))]
    num_params = sum(needed) + num_optional
    assert drafter.model.size == NetworkSize(num_params, 8 * num_params)
