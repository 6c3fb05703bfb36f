"""Memory of the simulated device: blocks that outlive their owners, because queued work on them may run later."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream.device.cpu import POISON
from slipstream.device.sim.check import Access, Gap, Region, Site

if TYPE_CHECKING:
    from slipstream.device.sim.device import SimDevice


class Block:
    """Raw memory. Queued operations hold it; tensors hold a ``Handle``, and when the last is gone it may be reused."""

    __slots__ = (
        "accesses",
        "freed",
        "gaps",
        "generation",
        "kind",
        "nbytes",
        "origin",
        "raw",
        "site",
        "stream_idx",
        "tenant",
    )

    def __init__(self, nbytes: int, kind: str, site: Site) -> None:
        self.nbytes = nbytes
        with torch.inference_mode(False):  # a block outlives the inference mode of its first owner
            self.raw = torch.full(((nbytes + 7) // 8 * 4,), POISON, dtype=torch.int16)
        self.kind = kind  # "device" or "pinned"
        self.site = site  # who made it
        self.accesses: list[Access] = []
        self.gaps: list[Gap] = []
        self.freed = False
        self.generation = 0  # counts its reuses
        self.tenant = 0  # the generation whose values it holds: a replay restores an earlier one
        self.stream_idx = 0  # the stream of its allocation
        self.origin: object = None  # the warm-up or capture in which it was allocated, if any

    def __str__(self) -> str:
        return f"{self.kind} memory of {self.site}"

    def tensor(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if not self.nbytes:
            return torch.empty_strided(shape, stride, dtype=dtype)
        if dtype is torch.bool:
            return self.raw.view(torch.uint8).as_strided(shape, stride).view(torch.bool)
        return self.raw.view(dtype).as_strided(shape, stride)


class Handle:
    """Ownership of a block, shared by a tensor and its views."""

    __slots__ = ("block", "pool")

    def __init__(self, block: Block, pool: Pool) -> None:
        self.block = block
        self.pool = pool

    def __del__(self) -> None:
        self.pool.give_back(self.block)


class Pool:
    """Blocks in stream order: what one operation frees, the next one on the same stream may reuse."""

    def __init__(self, device: SimDevice) -> None:
        self._device = device
        self._free: dict[tuple[int, int], list[Block]] = defaultdict(list)

    def take(self, nbytes: int, site: Site, why: str = "allocated and never written") -> Handle:
        device = self._device
        key = (device.current_stream.idx, -(-nbytes // 64))
        blocks = self._free[key]
        if blocks:
            block = blocks.pop()
            block.freed, block.nbytes, block.site = False, nbytes, site
            block.generation += 1
            block.tenant = block.generation
        else:
            block = Block(key[1] * 64, "device", site)
            block.nbytes, block.stream_idx = nbytes, key[0]
        block.origin = device.phase
        block.gaps = [Gap(0, nbytes, why, site)]
        return Handle(block, self)

    def give_back(self, block: Block) -> None:
        block.freed = True
        self._device.on_free(block)
        self._free[block.stream_idx, -(-block.nbytes // 64)].append(block)


def poison(inner: Tensor) -> None:
    """Overwrite with values that no computation yields."""
    if inner.itemsize == 1:
        inner.view(torch.uint8).fill_(POISON & 0xFF)
    elif inner.dtype.is_floating_point:
        inner.fill_(float("nan"))
    else:
        unit = POISON
        for _ in range(inner.dtype.itemsize // 2 - 1):
            unit = unit << 16 | POISON
        inner.fill_(unit)


def region_of(inner: Tensor, block: Block, *, writes: bool, reads: bool) -> Region | None:
    """The bytes a tensor spans, from its first element to its last."""
    if inner.numel() == 0:
        return None
    size = inner.itemsize
    low = int(inner.storage_offset()) * size
    span = 1
    for extent, step in zip(inner.shape, inner.stride(), strict=True):
        span += (int(extent) - 1) * int(step)
    return Region(block, low, low + span * size, writes, reads, block.generation)
