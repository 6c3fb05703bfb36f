from __future__ import annotations

import pytest

from slipstream.config import GRAPH_MODES
from slipstream.graphs.mode import CUDAGraphMode

M = CUDAGraphMode


@pytest.mark.parametrize(
    ("mode", "decode", "mixed"),
    [
        (M.NONE, M.NONE, M.NONE),
        (M.PIECEWISE, M.PIECEWISE, M.PIECEWISE),
        (M.FULL, M.FULL, M.FULL),
        (M.FULL_DECODE_ONLY, M.FULL, M.NONE),
        (M.FULL_AND_PIECEWISE, M.FULL, M.PIECEWISE),
    ],
)
def test_a_mode_for_decodes_and_one_for_mixed_batches(mode: M, decode: M, mixed: M) -> None:
    assert mode.decode_mode() is decode
    assert mode.mixed_mode() is mixed


def test_the_options_are_the_modes() -> None:
    assert [M(name) for name in GRAPH_MODES] == list(M)
