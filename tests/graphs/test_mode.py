from __future__ import annotations

import pytest

from slipstream.config import GRAPH_MODES
from slipstream.graphs.mode import CUDAGraphMode, draft_modes

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


@pytest.mark.parametrize(
    ("mode", "num_drafts", "first", "rest"),
    [
        (M.NONE, 3, M.NONE, M.NONE),
        (M.PIECEWISE, 3, M.PIECEWISE, M.NONE),
        (M.FULL, 3, M.FULL, M.FULL_DECODE_ONLY),
        (M.FULL_DECODE_ONLY, 3, M.FULL_DECODE_ONLY, M.FULL_DECODE_ONLY),
        (M.FULL_AND_PIECEWISE, 3, M.FULL_AND_PIECEWISE, M.FULL_DECODE_ONLY),
        (M.FULL, 1, M.FULL, M.NONE),
        (M.FULL_DECODE_ONLY, 1, M.FULL_DECODE_ONLY, M.NONE),
    ],
)
def test_modes_of_a_drafter(mode: M, num_drafts: int, first: M, rest: M) -> None:
    """Law 7: the first pass in the target's mode, decodes in full graphs or in none."""
    assert draft_modes(mode, has_rest=num_drafts > 1) == (first, rest)


def test_the_options_are_the_modes() -> None:
    assert [M(name) for name in GRAPH_MODES] == list(M)
