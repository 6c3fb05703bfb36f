"""Captured work: the same operations on the same memory with the same host numbers, in every replay."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from slipstream.device.sim.check import CaptureError, Gap, Region, Site, call_site, check_written, note_write, without
from slipstream.device.sim.memory import Block, Pool
from slipstream.device.sim.queue import Op, run_all

if TYPE_CHECKING:
    from slipstream.device.sim.device import SimDevice


class WarmUp:
    """The phase before a capture. Memory allocated now is not valid when the graph is replayed."""


class Recording:
    """A capture in progress."""

    def __init__(self, device: SimDevice, pool: Pool) -> None:
        self.device = device
        self.pool = pool
        self.stream = device.current_stream
        self.ops: list[Op] = []
        self.reads: dict[
            Region, Site
        ] = {}  # regions that the graph reads without writing them first, with their first reader
        self.writes: dict[Region, None] = {}
        self._written: dict[Block, list[Region]] = defaultdict(list)

    def add(self, op: Op) -> None:
        if self.device.current_stream is not self.stream:
            raise CaptureError(f"{op.site}: a graph of one stream cannot record work of another")
        for region in op.regions:
            if isinstance(region.block.origin, WarmUp):
                raise CaptureError(
                    f"{op.site} records the use of {region.block}, which the warm-up allocated: lazily initialised "
                    "state must be initialised again inside the recording"
                )
            if region.reads and region.block.origin is self:
                check_written(region, op.site)
            elif region.reads:
                for low, high in self._unwritten(region):
                    self.reads.setdefault(region._replace(low=low, high=high, writes=False), op.site)
        for region in op.regions:
            if region.writes:
                self.writes[region._replace(reads=False)] = None
                self._written[region.block].append(region)
                if region.block.origin is self:
                    note_write(region)
        self.ops.append(op)

    def _unwritten(self, region: Region) -> list[tuple[int, int]]:
        """The ranges of a region that no captured operation writes so far."""
        ranges = [(region.low, region.high)]
        for written in self._written.get(region.block, ()):
            ranges = [rest for low, high in ranges for rest in without(low, high, written)]
        return ranges


class SimGraph:
    """Replays a capture as one queued operation."""

    def __init__(self, recording: Recording) -> None:
        self._device = recording.device
        self._pool = recording.pool
        self._ops = recording.ops
        self._reads = list(recording.reads.items())
        self._writes = list(recording.writes)
        # Memory of a graph pool belongs to its graphs even when freed; other memory must outlive this graph.
        self._borrowed: dict[Block, int] = {
            region.block: region.generation
            for region in (*recording.reads, *recording.writes)
            if not isinstance(region.block.origin, Recording)
        }
        # Nothing has run: results must not be read before a replay.
        for region in self._writes:
            block = region.block
            if block.origin is recording:
                block.gaps = [Gap(0, block.nbytes, "recorded but not yet replayed", recording.ops[0].site)]

    def replay(self) -> None:
        device = self._device
        device.refuse_in_recording("replay")
        site = call_site("replay")
        for block, generation in self._borrowed.items():
            if block.generation != generation or block.freed:
                raise CaptureError(f"{site}: the graph uses {block}, which was freed after the recording")
        for region, reader in self._reads:
            check_written(region, reader)  # reported by the operation inside, not by the replay
        device.push(Op(self._run, site, [*(region for region, _ in self._reads), *self._writes]))

    def _run(self) -> None:
        run_all(self._ops)
