"""Sound files: formats, channels and rates become one kind of samples; what is damaged is one line."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pytest

from slipstream.audio.files import read_sound
from slipstream.errors import ConfigError, RequestError
from tests.audio.sounds import JFK, Samples, make_noise, make_tone

soundfile = pytest.importorskip("soundfile")


def encode(samples: Samples, rate: int = 16_000, **options: str) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"format": "WAV", "subtype": "PCM_16"}, 4e-5),
        ({"format": "WAV", "subtype": "FLOAT"}, 0.0),
        ({"format": "WAV", "subtype": "PCM_U8"}, 1e-2),
        ({"format": "FLAC"}, 4e-5),
        ({"format": "MP3"}, 2e-2),
        ({"format": "OGG", "subtype": "VORBIS"}, 2e-2),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else "",
)
def test_formats(options: dict[str, str], tolerance: float, tmp_path: Path) -> None:
    tone = make_tone(440.0, 32_000)
    content = encode(tone, **options)
    found = read_sound(content)
    assert found.dtype == np.float32 and abs(len(found) - 32_000) < 2000
    np.testing.assert_allclose(found[4000:-4000], tone[4000 : 4000 + len(found) - 8000], atol=tolerance)
    (tmp_path / "a.bin").write_bytes(content)  # the content says what it is, not the name
    np.testing.assert_array_equal(read_sound(tmp_path / "a.bin"), found)


def test_channels_are_mixed() -> None:
    left, right = make_noise(8000, 1), make_noise(8000, 2)
    found = read_sound(encode(np.stack([left, right], 1), format="WAV", subtype="FLOAT"))
    np.testing.assert_allclose(found, (left + right) / 2, atol=1e-7)


def test_rates() -> None:
    tone = make_tone(440.0, 44_100, 44_100)
    found = read_sound(encode(tone, 44_100, format="WAV", subtype="FLOAT"))
    np.testing.assert_allclose(found[1000:-1000], make_tone(440.0, 16_000)[1000:-1000], atol=2e-4)


def test_a_recording() -> None:
    found = read_sound(JFK)
    assert len(found) == 176_000 and 0.5 < np.abs(found).max() < 1.0


@pytest.mark.parametrize(
    "content", [b"", b"RIFF", b"no sound at all" * 99, JFK.read_bytes()[:40]], ids=["empty", "head", "text", "cut"]
)
def test_what_is_no_sound_is_one_line(content: bytes) -> None:
    with pytest.raises(RequestError, match=r"^song is no sound file that can be read \(.+\); use WAV, FLAC or MP3$"):
        read_sound(content, "song")


def test_a_cut_file_gives_what_it_holds_or_is_one_line() -> None:
    content = JFK.read_bytes()
    for length in range(1000, len(content), len(content) // 7):
        try:
            assert len(read_sound(content[:length])) <= 176_000
        except RequestError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (Path("/nowhere/a.wav"), "there is no sound file at /nowhere/a.wav"),
        (np.zeros((2, 5), np.float32), "samples must be floats of one channel at 16000 Hz"),
        (np.zeros(5, np.int16), "samples must be floats of one channel"),
        (np.array([0.0, np.nan], np.float32), "not finite"),
        (np.zeros(32_001, np.float32), "longer than 2 seconds"),
        (encode(np.zeros(32_001, np.float32), format="WAV"), "longer than 2 seconds"),
        (encode(np.zeros(100, np.float32), 500, format="WAV"), "1 channels at 500 Hz, which is not supported"),
        (encode(np.array([np.nan], np.float32), format="WAV", subtype="FLOAT"), "not numbers"),
    ],
)
def test_refusals(source: Path | Samples | bytes, reason: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_sound(source, max_seconds=2)
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(ConfigError, match=r"pip install 'slipstream\[audio\]'"):
        read_sound(JFK)
    assert len(read_sound(make_noise(10))) == 10
