from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.operation_checks import checked_operations


@pytest.fixture(autouse=True)
def _operations_keep_their_word() -> Iterator[None]:
    with checked_operations(compare_inputs=True):
        yield
