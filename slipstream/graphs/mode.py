"""How much of a step runs as a graph."""

from __future__ import annotations

import enum
from typing import NamedTuple

from slipstream.attention.backend import Caps


class CUDAGraphMode(enum.Enum):
    """A mode for all batches, or one for decode batches and another for mixed ones."""

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

        A piecewise graph pads tokens but not requests, and attention of a decode needs one token per request.
        """
        return CUDAGraphMode.FULL_DECODE_ONLY if self.decode_mode() is CUDAGraphMode.FULL else CUDAGraphMode.NONE


class DraftModes(NamedTuple):
    """The modes of a drafter's passes: the first over the tokens of the target's step, the others one per request."""

    first: CUDAGraphMode
    rest: CUDAGraphMode


def draft_modes(mode: CUDAGraphMode, has_rest: bool) -> DraftModes:
    """From the user's mode, as far as the backend's attention supports it."""
    return DraftModes(mode, mode.for_draft_decodes() if has_rest else CUDAGraphMode.NONE)


def usable_mode(mode: CUDAGraphMode, caps: Caps) -> CUDAGraphMode:
    """The part of the mode that the backend's attention supports."""
    if caps.graph_support == "always" or mode in (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE):
        return mode
    if caps.graph_support == "decode":
        return CUDAGraphMode.FULL_AND_PIECEWISE if mode is CUDAGraphMode.FULL else mode
    return CUDAGraphMode.NONE if mode is CUDAGraphMode.FULL_DECODE_ONLY else CUDAGraphMode.PIECEWISE
