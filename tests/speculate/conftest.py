from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.config import EngineOptions
from slipstream.engine.build import Engine, build_engine
from tests import tiny_models


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tiny_models.build("llama"), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def near_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter that is often right: the target with noise in its weights."""
    model = tiny_models.build("llama")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return tiny_models.save(model, tmp_path_factory.mktemp("near"))


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter of another shape, with no idea of the target: fewer layers, more key heads, wider heads."""
    changes = {"num_hidden_layers": 1, "num_key_value_heads": 3, "head_dim": 16, "hidden_size": 36}
    return tiny_models.save(tiny_models.build("llama", seed=3, **changes), tmp_path_factory.mktemp("small"))


@pytest.fixture
def make_engine(target_folder: Path) -> Callable[..., Engine]:
    """An engine over the tiny model in float64, where batching cannot change a token by rounding."""

    def make(**options: Any) -> Engine:
        defaults = {"model": str(target_folder), "dtype": "float64", "max_num_seqs": 12}
        return build_engine(EngineOptions.from_dict({**defaults, **options}))

    return make
