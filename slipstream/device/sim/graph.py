"""Recorded work: the same operations on the same memory with the same host numbers, again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.device.sim.check import CaptureError, Gap, Region, Site, call_site, stale_read
from slipstream.device.sim.memory import Block, Pool
from slipstream.device.sim.queue import Op

if TYPE_CHECKING:
    from slipstream.device.sim.device import SimDevice


class WarmUp:
    """The phase before a recording. What is allocated now is not there when the recording is replayed."""


class Recording:
    """A graph in the making."""

    def __init__(self, device: SimDevice, pool: Pool) -> None:
        self.device = device
        self.pool = pool
        self.stream = device.current_stream
        self.ops: list[Op] = []

    def add(self, op: Op) -> None:
        if self.device.current_stream is not self.stream:
            raise CaptureError(f"{op.site}: a graph of one stream cannot record work of another")
        for region in op.regions:
            if isinstance(region.block.origin, WarmUp):
                raise CaptureError(
                    f"{op.site} records the use of {region.block}, which the warm-up made: state that initialises "
                    "itself must do so once more inside the recording"
                )
        self.ops.append(op)


class SimGraph:
    """Replays a recording as one queued operation."""

    def __init__(self, recording: Recording) -> None:
        self._device = recording.device
        self._pool = recording.pool
        self._ops = recording.ops
        self._reads = list(_outside_reads(recording.ops))
        self._writes = list({r._replace(reads=False): None for op in recording.ops for r in op.regions if r.writes})
        self._generations: dict[Block, int] = {
            region.block: region.block.generation for region, _ in self._reads if region.block.origin is not recording
        }
        self._generations |= {r.block: r.block.generation for r in self._writes if r.block.origin is not recording}
        # Nothing has run: whoever reads the results before a replay reads nothing.
        for region in self._writes:
            if region.block.origin is recording:
                region.block.gaps = [
                    Gap(0, region.block.nbytes, "recorded but not yet replayed", recording.ops[0].site)
                ]

    def replay(self) -> None:
        device = self._device
        device.refuse_in_recording("replay")
        site = call_site("replay")
        for block, generation in self._generations.items():
            if block.generation != generation or block.freed:
                raise CaptureError(f"{site}: the graph uses {block}, which was freed after the recording")
        regions = []
        for region, reader in self._reads:
            for gap in region.block.gaps:
                if gap.low < region.high and region.low < gap.high:
                    raise stale_read(region, gap, reader)  # named by the operation inside, not by the replay
            regions.append(region)
        device.push(Op(self._run, site, [*regions, *self._writes]))

    def _run(self) -> None:
        for op in self._ops:
            op.run()


def _outside_reads(ops: list[Op]) -> list[tuple[Region, Site]]:
    """What the operations read that none before them has written in full."""
    written: list[Region] = []
    found: dict[Region, Site] = {}
    for op in ops:
        for region in op.regions:
            if region.reads and not any(
                w.block is region.block and w.low <= region.low and region.high <= w.high for w in written
            ):
                found.setdefault(region._replace(writes=False), op.site)
        written += [region for region in op.regions if region.writes]
    return list(found.items())
