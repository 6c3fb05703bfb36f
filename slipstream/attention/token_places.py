"""How the tokens of a pass are rotated, and where they are stored: the same in all layers of a group."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.attention.context import StepTokens
from slipstream.kernels.attention.rope_cache import TokenPlaces, rotation, rotation_and_slots


class PassPlaces:
    """Computed by the first layer that needs them, so that a graph of that layer contains the launch."""

    def __init__(self, tokens: StepTokens, num_pages: int, page_size: int) -> None:
        self._positions, self._slot_mapping = tokens.positions, tokens.slot_mapping
        self._sizes = (num_pages, page_size)  # of the memory, its last page included
        self._slots: tuple[Tensor, Tensor] | None = None
        self._rotations: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, cos_sin: Tensor, dtype: torch.dtype) -> TokenPlaces:
        """For layers that rotate by this table; ``dtype`` is the model's."""
        turn = self._rotations.get(id(cos_sin))
        if turn is None:
            if self._slots is None:
                found = rotation_and_slots(cos_sin, self._positions, dtype, self._slot_mapping, *self._sizes)
                turn, self._slots = found[:2], found[2:]
            else:
                turn = rotation(cos_sin, self._positions, dtype)
            self._rotations[id(cos_sin)] = turn
        assert self._slots is not None
        return TokenPlaces(*turn, *self._slots)
