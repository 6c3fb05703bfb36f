"""Log-mel features against the feature extractor of ``transformers``."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor
from transformers.audio_utils import mel_filter_bank

from slipstream.audio.files import read_sound
from slipstream.audio.log_mel import SAMPLE_RATE, compute_log_mel, make_mel_filters
from tests.audio.sounds import JFK, Samples, make_noise, make_tone

WINDOW = 30 * SAMPLE_RATE


def pad(samples: Samples) -> Samples:
    return np.pad(samples, (0, WINDOW - len(samples)))


SOUNDS = {
    "speech": lambda: read_sound(JFK),
    "noise": lambda: make_noise(WINDOW),
    "tone": lambda: make_tone(440.0, 5 * SAMPLE_RATE),
    "silence": lambda: np.zeros(WINDOW, np.float32),
    "a-click": lambda: np.eye(1, 16_000, 7_000, dtype=np.float32)[0],
}


@pytest.mark.parametrize("num_bands", [80, 128])
@pytest.mark.parametrize("sound", SOUNDS)
def test_features_of_a_window(sound: str, num_bands: int) -> None:
    samples = SOUNDS[sound]()
    extractor = WhisperFeatureExtractor(feature_size=num_bands)
    expected = extractor(samples, sampling_rate=SAMPLE_RATE, return_tensors="np").input_features[0]
    found = compute_log_mel(pad(samples), num_bands)
    assert found.shape == (num_bands, 3000) and found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("num_bands", [80, 128])
def test_filters(num_bands: int) -> None:
    expected = mel_filter_bank(201, num_bands, 0.0, 8000.0, SAMPLE_RATE, norm="slaney", mel_scale="slaney")
    np.testing.assert_allclose(make_mel_filters(num_bands), expected.T, atol=1e-7)


@pytest.mark.parametrize("num_samples", [0, 1, 159, 160, 399, 1601])
def test_short_sounds(num_samples: int) -> None:
    found = compute_log_mel(make_noise(num_samples), 80)
    assert found.shape == (80, num_samples // 160) and np.isfinite(found).all()
