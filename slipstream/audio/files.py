"""Sound files as samples: one channel, 16 kHz, float32. Decoding is libsndfile's (WAV, FLAC, MP3, OGG and more)."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.audio.log_mel import SAMPLE_RATE
from slipstream.audio.resample import resample
from slipstream.errors import ConfigError, RequestError
from slipstream.values import describe_value

Samples = npt.NDArray[np.float32]
Sound = str | Path | bytes | Samples

MAX_SECONDS = 4 * 3600  # a compressed file may hold a thousand times its size
_BLOCK_SECONDS = 60
_RATES = range(1000, 384_001)
_MAX_CHANNELS = 64


def read_sound(
    source: Sound,  # a file, its bytes, or samples of one channel at 16 kHz
    name: str = "",  # in messages, where ``source`` is not a path
    max_seconds: int = MAX_SECONDS,
) -> Samples:  # [num_samples]
    if isinstance(source, np.ndarray):
        return _check_samples(source, max_seconds)
    if isinstance(source, bytes):
        return _decode(io.BytesIO(source), name or "the file", max_seconds)
    path = Path(source)
    if not path.is_file():
        raise RequestError(f"there is no sound file at {path}; check the path")
    return _decode(path, str(path), max_seconds)


def _check_samples(samples: npt.NDArray[Any], max_seconds: int) -> Samples:
    if samples.ndim != 1 or samples.dtype.kind != "f":
        raise RequestError(
            f"samples must be floats of one channel at {SAMPLE_RATE} Hz, "
            f"not {samples.dtype} of shape {describe_value(samples.shape)}"
        )
    if len(samples) > max_seconds * SAMPLE_RATE:
        raise _too_long("the sound", max_seconds)
    if not np.isfinite(samples).all():
        raise RequestError("the samples hold numbers that are not finite; convert them")
    return np.ascontiguousarray(samples, dtype=np.float32)


def _decode(source: io.BytesIO | Path, name: str, max_seconds: int) -> Samples:
    soundfile = import_soundfile()
    try:
        with soundfile.SoundFile(source) as file:
            rate, channels = file.samplerate, file.channels
            if rate not in _RATES or channels > _MAX_CHANNELS:
                raise RequestError(f"{name} has {channels} channels at {rate} Hz, which is not supported; convert it")
            if file.frames > max_seconds * rate:
                raise _too_long(name, max_seconds)
            blocks = list(_read_mono(file, name, max_seconds))
    except (soundfile.LibsndfileError, OSError) as error:
        reason = str(getattr(error, "error_string", error)).strip().rstrip(".")
        raise RequestError(f"{name} is no sound file that can be read ({reason}); use WAV, FLAC or MP3") from error
    samples = np.concatenate(blocks) if blocks else np.zeros(0, np.float32)
    if not np.isfinite(samples).all():  # of a damaged file in floats
        raise RequestError(f"{name} holds samples that are not numbers; it is damaged")
    return resample(samples, rate, SAMPLE_RATE)


def _read_mono(file: Any, name: str, max_seconds: int) -> Iterator[Samples]:
    """In blocks, so that the channels are never all in memory. The header's length is not trusted."""
    num_left = max_seconds * file.samplerate
    while len(block := file.read(_BLOCK_SECONDS * file.samplerate, dtype="float32", always_2d=True)):
        num_left -= len(block)
        if num_left < 0:
            raise _too_long(name, max_seconds)
        yield block.mean(axis=1, dtype=np.float32)


def _too_long(name: str, max_seconds: int) -> RequestError:
    return RequestError(f"{name} is longer than {max_seconds} seconds; cut it into parts")


def import_soundfile() -> Any:
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: the package is there, its library is not
        raise ConfigError(
            f"reading sound files needs the package soundfile ({error}); pip install 'slipstream[audio]'"
        ) from error
    return soundfile
