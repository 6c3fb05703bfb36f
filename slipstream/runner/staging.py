"""Staged writes: changes to device state, collected on the host, applied by one copy and one scatter per step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.device.interface import Device, Event
from slipstream.kernels.step.row_writes import write_rows
from slipstream.runner.rings import Ring

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(slots=True)
class _StagingSlot:
    pinned: Tensor  # [3 * capacity] int32
    on_device: Tensor  # [3 * capacity] int32
    event: Event


class StagedWrites:
    """Runs of int32 values to be written to a flat store. If nothing is staged, nothing is copied."""

    def __init__(self, device: Device, capacity: int, depth: int) -> None:
        self._device = device
        self._capacity = capacity
        self._runs: list[tuple[int | Int64s, Int32s]] = []  # the first index, or the index of each value
        size = (3 * capacity,)
        self._ring = Ring(
            [
                _StagingSlot(
                    device.pinned_empty(size, torch.int32),
                    torch.empty(size, dtype=torch.int32, device=device.torch_device),
                    device.event(),
                )
                for _ in range(depth)
            ]
        )

    def put(self, start: int, values: Int32s) -> None:
        """Stage a run of consecutive values. Runs of one step must not overlap."""
        self._runs.append((start, values))

    def put_at(self, destinations: Int64s, values: Int32s) -> None:
        """Stage values for scattered indices; one large array is staged faster than many small ones."""
        self._runs.append((destinations, values))

    def flush(self, store: Tensor) -> int:
        """Queue the write on the current stream; returns how many values were written."""
        if not self._runs:
            return 0
        n = sum(len(values) for _, values in self._runs)
        if n > self._capacity:
            raise RuntimeError(f"{n} staged values exceed the capacity of {self._capacity}")
        slot = self._ring.acquire()
        self._fill(slot.pinned[: 3 * n].numpy(), n)
        self._runs.clear()
        self._device.copy_async(slot.on_device[: 3 * n], slot.pinned[: 3 * n])
        slot.event.record(self._device.compute_stream)
        write_rows(store, slot.on_device[: 3 * n])
        return n

    def _fill(self, packed: Int32s, n: int) -> None:
        destinations, values = packed[: 2 * n].view(np.int64), packed[2 * n :]
        at = 0
        for where, run in self._runs:
            end = at + len(run)
            destinations[at:end] = np.arange(where, where + len(run)) if isinstance(where, int) else where
            values[at:end] = run
            at = end
