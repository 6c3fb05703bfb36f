"""Pieces of a long sound: they cover it, are short enough, and begin where it is quiet."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from slipstream.audio.quiet_places import cut_at_quiet_places
from tests.audio.sounds import make_noise

SECOND = 16_000


@pytest.mark.parametrize("num_samples", [0, 1, 5 * SECOND, 10 * SECOND, 10 * SECOND + 1, 73 * SECOND + 17])
def test_pieces_cover_everything_once(num_samples: int) -> None:
    pieces = cut_at_quiet_places(make_noise(num_samples), 10 * SECOND, 3 * SECOND)
    assert pieces[0][0] == 0 and pieces[-1][1] == num_samples
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(pieces))
    assert all(end - begin <= 10 * SECOND for begin, end in pieces)
    assert all(end - begin >= 7 * SECOND for begin, end in pieces[:-1])


def test_cuts_are_in_pauses() -> None:
    noise = make_noise(30 * SECOND)
    pauses = [(8.2, 8.7), (17.0, 17.4), (26.1, 26.3)]
    for begin, end in pauses:
        noise[int(begin * SECOND) : int(end * SECOND)] *= 0.01
    cuts = [end / SECOND for _, end in cut_at_quiet_places(noise, 10 * SECOND, 3 * SECOND)[:-1]]
    assert len(cuts) == 3
    assert all(begin < cut < end for cut, (begin, end) in zip(cuts, pauses, strict=True))


def test_in_silence_pieces_are_as_long_as_they_may_be() -> None:
    pieces = cut_at_quiet_places(np.zeros(25 * SECOND, np.float32), 10 * SECOND, 3 * SECOND)
    assert pieces == [(0, 10 * SECOND), (10 * SECOND, 20 * SECOND), (20 * SECOND, 25 * SECOND)]
