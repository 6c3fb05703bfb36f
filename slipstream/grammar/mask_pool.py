"""Which mask is where in the pool on the device: the host's side of it, by content."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from slipstream.grammar.interface import Words


class Placed(NamedTuple):
    rows: Words  # [m]: the pool's row of each mask
    new: list[int]  # masks that the device does not have yet, by index
    destinations: list[int]  # the pool's row of each of those


class MaskPool:
    """The rows of the pool, least recently used first.

    A row may be given to another mask while a step in flight still reads the old one: new masks are written in the
    order of the device's work. Within one step no row is given twice, since the pool has one for every mask of a step.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._row_of: OrderedDict[bytes, int] = OrderedDict()

    def place(self, masks: Words) -> Placed:
        rows, new, destinations = np.empty(len(masks), dtype=np.int32), [], []
        known = self._row_of
        for idx, mask in enumerate(masks):
            key = mask.tobytes()
            row = known.pop(key, None)
            if row is None:
                row = len(known) if len(known) < self._num_rows else known.popitem(last=False)[1]
                new.append(idx)
                destinations.append(row)
            known[key] = rows[idx] = row
        return Placed(rows, new, destinations)
