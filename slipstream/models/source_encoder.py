"""The encoder of an encoder-decoder, as the runner and drafters see it.

It runs once for a request, beside the steps of others. What the decoder reads of its output are the keys and values of
its layers of cross attention. They are computed once, and kept in pages that are indexed by the output's entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from torch import Tensor


class EncodedLayer(NamedTuple):
    """What one layer of cross attention keeps of a request."""

    layer_idx: int  # among the caches of the network
    keys: Tensor  # [num_entries, num_kv_heads, head_dim]
    values: Tensor  # the same


class SourceEncoder(Protocol):
    def encode(self, features: Tensor) -> Iterator[EncodedLayer]:
        """``features`` are one request's: [num_bins, num_frames]. Launches alone."""
        ...
