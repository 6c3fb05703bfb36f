from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.attention.backend import Caps
from slipstream.config import EngineConfig, EngineOptions
from slipstream.engine import build
from slipstream.engine.build import Engine, build_engine
from slipstream.runner.step_timing import OnCost
from slipstream.scheduler.draft_length import DraftLength
from tests import tiny_models
from tests.sim.world import RandomLength


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


@pytest.fixture
def any_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines whose draft length adapts check and make any number of drafts, drawn anew every few steps."""

    def drawn(config: EngineConfig, _caps: Caps) -> tuple[DraftLength | None, OnCost | None]:
        speculative = config.speculative
        return (RandomLength(speculative.lengths, 7), None) if speculative and speculative.adaptive else (None, None)

    monkeypatch.setattr(build, "decide_draft_length", drawn)
