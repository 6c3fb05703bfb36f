"""Resampling against sines, whose samples at any rate are known."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.audio.resample import resample
from tests.audio.sounds import make_noise, make_tone

RATES = [8000, 11_025, 22_050, 24_000, 32_000, 44_100, 48_000, 96_000, 16_001]


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("hertz", [50.0, 1000.0, 3200.0])
def test_a_tone_stays_a_tone(rate: int, hertz: float) -> None:
    found = resample(make_tone(hertz, rate, rate), rate, 16_000)
    assert len(found) == 16_000 and found.dtype == np.float32
    # The ends see the silence around the sound.
    middle = slice(1000, -1000)
    np.testing.assert_allclose(found[middle], make_tone(hertz, 16_000)[middle], atol=2e-4)


@pytest.mark.parametrize("rate", [22_050, 44_100, 48_000])
def test_what_the_new_rate_cannot_hold_is_removed(rate: int) -> None:
    found = resample(make_tone(8_300.0, rate, rate), rate, 16_000)
    assert np.abs(found[1000:-1000]).max() < 5e-4  # 60 dB below


def test_the_same_rate_changes_nothing() -> None:
    noise = make_noise(1000)
    assert resample(noise, 16_000, 16_000) is noise


@pytest.mark.parametrize(("length", "expected"), [(0, 0), (1, 1), (2, 1), (3, 2), (441, 160), (442, 161)])
def test_lengths(length: int, expected: int) -> None:
    assert len(resample(make_noise(length), 44_100, 16_000)) == expected
