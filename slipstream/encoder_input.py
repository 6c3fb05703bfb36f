"""What the encoder of an encoder-decoder model reads, as plain data.

Imports numpy alone, so that front ends and the processes between may use it without torch.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """Features for the encoder: for Whisper the log-mel spectrogram of one window of sound."""

    features: np.ndarray  # float32 [num_mel_bins, frames], e.g. [80, 3000] for Whisper

    def __post_init__(self) -> None:
        if self.features.dtype != np.float32 or self.features.ndim != 2:
            raise ValueError(
                "encoder features are a float32 array of two dimensions, [bins, frames]; "
                f"got {self.features.dtype} with shape {self.features.shape}"
            )

    def digest(self) -> bytes:
        """A hash of the contents: equal for equal features, for keys of caches."""
        hasher = hashlib.blake2b(repr(self.features.shape).encode(), digest_size=16)
        hasher.update(np.ascontiguousarray(self.features).data)
        return hasher.digest()


@dataclass(frozen=True, slots=True)
class EncoderPrompt:
    """A prompt for an encoder-decoder: the decoder's first tokens and the encoder's input."""

    token_ids: Sequence[int]
    encoder: EncoderInput
