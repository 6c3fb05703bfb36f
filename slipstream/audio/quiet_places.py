"""Where to cut a long sound into pieces of limited length: at the quietest place near the end of each."""

from __future__ import annotations

import numpy as np

from slipstream.audio.files import Samples
from slipstream.audio.log_mel import SAMPLE_RATE

_STEP = SAMPLE_RATE // 50  # loudness is measured over 20 ms
_REACH = 3  # a place is as quiet as so many steps before and after it


def cut_at_quiet_places(
    samples: Samples,
    longest: int,  # samples of a piece, at most
    searched: int,  # how much of a piece's end is searched for the quietest place
) -> list[tuple[int, int]]:
    """Begin and end of each piece, in samples. Together they cover everything, and none overlap."""
    loudness = _measure_loudness(samples)
    pieces, begin = [], 0
    while len(samples) - begin > longest:
        first = -(-(begin + longest - searched) // _STEP)
        last = (begin + longest) // _STEP
        # Of equally quiet places, the latest: fewer pieces.
        place = last - int(np.argmin(loudness[first : last + 1][::-1]))
        pieces.append((begin, place * _STEP))
        begin = place * _STEP
    return [*pieces, (begin, len(samples))]


def _measure_loudness(samples: Samples) -> Samples:
    """Mean power around each border between steps; entry ``i`` is for sample ``i * _STEP``."""
    num_steps = len(samples) // _STEP
    power = np.square(samples[: num_steps * _STEP]).reshape(num_steps, _STEP).mean(1)
    around = np.pad(power, _REACH, mode="edge") if num_steps else power
    total = np.concatenate([[0.0], np.cumsum(around, dtype=np.float64)])
    found: Samples = (total[2 * _REACH :] - total[: -2 * _REACH]).astype(np.float32)
    return found
