"""Sounds whose content is known, and a recording: eleven seconds of a speech of 1961, in the public domain."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.float32]

JFK = Path(__file__).parent / "jfk.flac"


def make_noise(num_samples: int, seed: int = 0) -> Samples:
    return np.random.default_rng(seed).standard_normal(num_samples).astype(np.float32) * 0.1


def make_tone(hertz: float, num_samples: int, rate: int = 16_000) -> Samples:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(num_samples) / rate)).astype(np.float32)
