"""Resampling by a polyphase filter: a sinc cut by a Kaiser window, evaluated at the phases that a ratio of rates has.

With ``old / new`` as the ratio in lowest terms, a block of ``old`` samples gives ``new``, each by a phase of its own.
All outputs of some phases are one product: of the samples, seen as rows, with the weights of the phases.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# Zero crossings of the sinc on each side, the window's shape, and the share of the band that passes: attenuation is
# about 100 dB, and the transition is the last part of the band.
_CROSSINGS, _KAISER_BETA, _PASS_BAND = 64, 10.0, 0.945
_SAMPLES_AT_ONCE = 1 << 19  # which stay in a core's cache while all phases read them


_PHASES_AT_ONCE = 16  # in one product; their taps are a little apart, and zeros fill what is between


class _Filters(NamedTuple):
    old: int  # samples from a block to the next
    new: int  # phases
    groups: list[tuple[int, npt.NDArray[np.float32]]]  # the first sample that phases read, and weights [taps, phases]


def resample(
    samples: npt.NDArray[np.float32],  # [num_samples]
    old_rate: int,
    new_rate: int,
) -> npt.NDArray[np.float32]:  # [ceil(num_samples * new_rate / old_rate)]
    if old_rate == new_rate or not len(samples):
        return samples
    filters = _make_filters(old_rate, new_rate)
    old, before = filters.old, -filters.groups[0][0]
    length = -(-len(samples) * new_rate // old_rate)
    num_blocks = -(-length // filters.new)
    padded = np.pad(samples, (before, (num_blocks + 2) * old - len(samples)))
    out = np.empty((num_blocks, filters.new), np.float32)
    at_once = max(1, _SAMPLES_AT_ONCE // old)
    for start in range(0, num_blocks, at_once):
        count, phase = min(at_once, num_blocks - start), 0
        for first, weights in filters.groups:
            taps, num_phases = weights.shape
            begin = before + start * old + first
            rows = padded[begin : begin + count * old].reshape(count, old)[:, :taps]
            np.matmul(rows, weights, out=out[start : start + count, phase : phase + num_phases])
            phase += num_phases
    return out.reshape(-1)[:length]


@functools.lru_cache(maxsize=8)
def _make_filters(old_rate: int, new_rate: int) -> _Filters:
    divisor = math.gcd(old_rate, new_rate)
    old, new = old_rate // divisor, new_rate // divisor
    cutoff = min(1.0, new / old) * _PASS_BAND  # in units of the input's band
    width = math.ceil(_CROSSINGS / cutoff)
    # Blocks of several periods where one is shorter than the filters, so that a row of samples holds all their taps.
    most_taps = 2 * width + math.ceil(_PHASES_AT_ONCE * old / new)
    periods = -(-most_taps // old)
    old, new = old * periods, new * periods
    groups = []
    for phase in range(0, new, _PHASES_AT_ONCE):
        last = min(phase + _PHASES_AT_ONCE, new) - 1
        first = phase * old // new - width + 1
        taps = np.arange(first, last * old // new + width + 1)
        distance = (taps[:, None] - np.arange(phase, last + 1) * old / new) * cutoff
        groups.append((first, _weigh(distance, cutoff)))
    return _Filters(old, new, groups)


def _weigh(distance: npt.NDArray[np.float64], cutoff: float) -> npt.NDArray[np.float32]:
    """By distances in zero crossings."""
    share = np.clip(distance / _CROSSINGS, -1.0, 1.0)
    window = np.i0(_KAISER_BETA * np.sqrt(1 - np.square(share))) / np.i0(_KAISER_BETA)
    weights = cutoff * np.sinc(distance) * window * (np.abs(distance) <= _CROSSINGS)
    return np.ascontiguousarray(weights, np.float32)
