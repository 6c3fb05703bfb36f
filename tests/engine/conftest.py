from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.config import EngineOptions
from slipstream.engine.build import Engine, build_engine
from tests import tiny_models
from tests.operation_checks import checked_operations


@pytest.fixture(autouse=True)
def _operations_keep_their_word() -> Iterator[None]:
    with checked_operations(compare_inputs=False):
        yield


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tiny_models.build("llama"), tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture
def make_engine(tiny_folder: Path) -> Callable[..., Engine]:
    """An engine over the tiny model in float64, where batching cannot change a token by rounding."""

    def make(**options: Any) -> Engine:
        defaults = {"model": str(tiny_folder), "dtype": "float64", "max_num_seqs": 16}
        return build_engine(EngineOptions.from_dict({**defaults, **options}))

    return make
