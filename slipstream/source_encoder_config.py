"""What an encoder-decoder's encoder reads, and its shape."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SourceEncoderConfig:
    """The encoder of an encoder-decoder: what it reads, and its shape."""

    num_bins: int  # of an input
    max_frames: int
    frames_per_entry: int  # of the output
    num_layers: int
    num_heads: int
    intermediate_size: int

    @property
    def max_entries(self) -> int:
        return self.max_frames // self.frames_per_entry
