from __future__ import annotations

from collections.abc import Iterator

import pytest

from slipstream.kernels.attention import decode_attention, index_scores
from tests.operation_checks import checked_operations


@pytest.fixture(autouse=True)
def _operations_keep_their_word() -> Iterator[None]:
    with checked_operations(compare_inputs=True):
        yield


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU starts programs that have nothing to do for nothing, an interpreter does not."""
    for module in (decode_attention, index_scores):
        monkeypatch.setattr(module, "_WANTED_PROGRAMS", 24)
