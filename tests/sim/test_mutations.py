"""The list of planted faults is kept true: each names one place of the code."""

from __future__ import annotations

import pytest

from tests.sim.mutations import MUTATIONS, ROOT, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_line_is_there(mutation: Mutation) -> None:
    assert (ROOT / "slipstream" / mutation.file).read_text().count(mutation.line) == 1
    assert mutation.line != mutation.changed
