"""Log-mel features: the power of mel bands every ten milliseconds, in decades, as Whisper's encoders take them."""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt
import torch

SAMPLE_RATE = 16_000
HOP_LENGTH = 160
FRAMES_PER_SECOND = SAMPLE_RATE // HOP_LENGTH
_WINDOW_LENGTH = 400
_MAX_HZ = 8000.0
_SMALLEST_POWER = 1e-10
_DECADES = 8.0  # below the loudest band; what is quieter is raised to it


def compute_log_mel(
    samples: npt.NDArray[np.float32],  # [num_samples], mono at 16 kHz
    num_bands: int,
) -> npt.NDArray[np.float32]:  # [num_bands, num_samples // 160]
    """The frames are centred, with reflection at both ends; the loudest band of all of them sets the floor."""
    signal = torch.from_numpy(np.ascontiguousarray(samples, dtype=np.float32))
    if len(signal) <= _WINDOW_LENGTH // 2:  # too short to be reflected
        signal = torch.nn.functional.pad(signal, (0, _WINDOW_LENGTH))
    window = torch.hann_window(_WINDOW_LENGTH, dtype=torch.float32)
    spectrum = torch.stft(signal, _WINDOW_LENGTH, HOP_LENGTH, window=window, return_complex=True)
    power = torch.view_as_real(spectrum[:, : len(samples) // HOP_LENGTH]).square().sum(2)
    bands = torch.from_numpy(make_mel_filters(num_bands)) @ power
    decades = bands.clamp_(min=_SMALLEST_POWER).log10_()
    if decades.numel():
        decades.clamp_(min=decades.max() - _DECADES)
    found: npt.NDArray[np.float32] = decades.add_(4.0).div_(4.0).numpy()
    return found


@functools.cache
def make_mel_filters(num_bands: int) -> npt.NDArray[np.float32]:  # [num_bands, 201]
    """Triangles between neighbouring centres on Slaney's mel scale, each of unit area."""
    hertz = _mel_to_hertz(np.linspace(0.0, _hertz_to_mel(_MAX_HZ), num_bands + 2))
    bins = np.linspace(0.0, SAMPLE_RATE / 2, _WINDOW_LENGTH // 2 + 1)
    below, centre, above = hertz[:-2, None], hertz[1:-1, None], hertz[2:, None]
    rising, falling = (bins - below) / (centre - below), (above - bins) / (above - centre)
    triangles = np.maximum(0.0, np.minimum(rising, falling))
    found: npt.NDArray[np.float32] = (triangles * (2.0 / (above - below))).astype(np.float32)
    return found


# Slaney's scale: linear up to 1000 Hz, at 200/3 Hz a mel, and from there on a factor of 6.4 in 27 mels.
_LINEAR_HZ, _LINEAR_STEP, _LOG_STEP = 1000.0, 200.0 / 3.0, math.log(6.4) / 27.0


def _hertz_to_mel(hertz: float) -> float:
    if hertz < _LINEAR_HZ:
        return hertz / _LINEAR_STEP
    return _LINEAR_HZ / _LINEAR_STEP + math.log(hertz / _LINEAR_HZ) / _LOG_STEP


def _mel_to_hertz(mels: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    bend = _LINEAR_HZ / _LINEAR_STEP
    return np.where(mels < bend, mels * _LINEAR_STEP, _LINEAR_HZ * np.exp(_LOG_STEP * (mels - bend)))
