"""How much of a step runs as a graph."""

from __future__ import annotations

import enum
from typing import NamedTuple

from slipstream.attention.backend import Caps


class CUDAGraphMode(enum.Enum):
    """A mode for all batches, or one for batches of decodes and another for mixed ones."""

    NONE = "none"
    PIECEWISE = "piecewise"  # graphs between attention layers, attention itself launched
    FULL = "full"  # one graph, attention included
    FULL_DECODE_ONLY = "full_decode_only"
    FULL_AND_PIECEWISE = "full_and_piecewise"

    def decode_mode(self) -> CUDAGraphMode:
        """The mode of a batch in which every request has equally many query tokens."""
        if self in (CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE):
            return CUDAGraphMode.FULL
        return self

    def mixed_mode(self) -> CUDAGraphMode:
        """The mode of any other batch."""
        if self is CUDAGraphMode.FULL_DECODE_ONLY:
            return CUDAGraphMode.NONE
        if self is CUDAGraphMode.FULL_AND_PIECEWISE:
            return CUDAGraphMode.PIECEWISE
        return self

    def for_draft_decodes(self) -> CUDAGraphMode:
        """Drafts are decoded in full graphs or in none.

        A piecewise graph pads tokens, not requests, and a decode's attention wants one token a request.
        """
        return CUDAGraphMode.FULL_DECODE_ONLY if self.decode_mode() is CUDAGraphMode.FULL else CUDAGraphMode.NONE


class DraftModes(NamedTuple):
    """How a drafter's passes run: the first over what the target has computed, the rest a token a request."""

    first: CUDAGraphMode
    rest: CUDAGraphMode


def draft_modes(mode: CUDAGraphMode, num_drafts: int) -> DraftModes:
    """From the user's mode, of which the backend's attention can do this much."""
    rest = mode.for_draft_decodes() if num_drafts > 1 else CUDAGraphMode.NONE  # one draft has no rest
    return DraftModes(mode, rest)


def usable_mode(mode: CUDAGraphMode, caps: Caps) -> CUDAGraphMode:
    """The part of the mode that the backend's attention can be recorded for."""
    if caps.graph_support == "always" or mode in (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE):
        return mode
    if caps.graph_support == "decode":
        return CUDAGraphMode.FULL_AND_PIECEWISE if mode is CUDAGraphMode.FULL else mode
    return CUDAGraphMode.NONE if mode is CUDAGraphMode.FULL_DECODE_ONLY else CUDAGraphMode.PIECEWISE
