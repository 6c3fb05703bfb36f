"""Hashes of 64 bits, and how they travel in tensors of floats."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInts = npt.NDArray[np.uint64]


def scramble(x: UInts) -> UInts:
    """The finaliser of splitmix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def halves(x: UInts) -> npt.NDArray[np.float64]:
    """64 bits as two numbers that a float holds."""
    low, high = x & np.uint64(0xFFFFFFFF), x >> np.uint64(32)
    return np.stack([low, high], axis=-1).astype(np.float64)


def read_whole(x: npt.NDArray[np.float64]) -> UInts:
    if not (np.isfinite(x).all() and (x >= 0).all() and (x < 2**48).all()):
        raise ValueError("a value that no token left here")
    return x.astype(np.uint64)
