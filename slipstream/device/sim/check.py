"""Detects races between a host and an asynchronous device deterministically, by vector clocks.

Every access is a range of bytes with an actor (the host, or a stream) and the actor's own time. Two overlapping
accesses of different actors, one of them a write, must be ordered: by an event, or by the host having waited. Vector
clocks say what each actor knows of the others, so a race is reported whatever the timing was.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from slipstream.device.sim.memory import Block

HOST = 0  # the host's index in every clock; streams follow


class SimError(RuntimeError):
    """A fault that the simulated device found."""


class RaceError(SimError):
    """Two accesses to the same bytes that nothing orders."""


class StaleReadError(SimError):
    """A read of memory that was not written since it was allocated, or since the step began."""


class CaptureError(SimError):
    """An operation that a graph cannot capture, or a replay that cannot be correct."""


class DeviceFaultError(SimError):
    """A device operation failed when it ran, which is later than when it was launched."""


class Site(NamedTuple):
    """The source line of an access: the innermost one outside the device and torch."""

    file: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.what} at {Path(self.file).name}:{self.line}"


_DEVICE_FOLDER = str(Path(__file__).parent.parent)
_TORCH_FOLDER = str(Path(torch.__file__).parent)
_is_inside: dict[str, bool] = {}


def call_site(what: str) -> Site:
    frame = sys._getframe(1)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        inside = _is_inside.get(file)
        if inside is None:
            inside = _is_inside[file] = file.startswith((_DEVICE_FOLDER, _TORCH_FOLDER)) or "contextlib" in file
        if not inside:
            break
        frame = frame.f_back
    return Site(frame.f_code.co_filename, frame.f_lineno, what)


class Region(NamedTuple):
    block: Block
    low: int  # bytes
    high: int
    writes: bool
    reads: bool
    generation: int  # the block's, when the region was made
    name: str = ""  # of an operation's argument, such as rows.num_tokens


class Access(NamedTuple):
    low: int
    high: int
    writes: bool
    actor: int
    time: int  # the actor's own count
    site: Site


class Gap(NamedTuple):
    """Bytes without meaningful content."""

    low: int
    high: int
    why: str
    site: Site


def touch(region: Region, actor: int, time: int, clock: list[int], site: Site) -> None:
    """Record an access; raise if an unordered one overlaps it, or if it reads bytes that were never written."""
    block, low, high, writes = region.block, region.low, region.high, region.writes
    accesses = block.accesses
    for old in accesses:
        if old.actor != actor and old.low < high and low < old.high and clock[old.actor] < old.time:  # noqa: SIM102
            if writes or old.writes:
                verb, old_verb = "write" if writes else "read", "write" if old.writes else "read"
                raise RaceError(
                    f"{_name(actor)} {verb} by {site} is not ordered after {_name(old.actor)} {old_verb} by {old.site} "
                    f"(bytes {max(low, old.low)} to {min(high, old.high)} of {block})"
                )
    if region.reads:
        check_written(region, site)
    new = Access(low, high, writes, actor, time, site)
    if writes:
        # Everything that the write covers is ordered before it, so older accesses can be dropped.
        block.accesses = [old for old in accesses if old.low < low or old.high > high]
        note_write(region)
    else:
        block.accesses = [
            old for old in accesses if old.writes or old.actor != actor or old.low != low or old.high != high
        ]
    block.accesses.append(new)


def check_written(region: Region, reader: Site) -> None:
    """Raise if the region holds bytes that its owner has not written."""
    block, of_name = region.block, f" {region.name}," if region.name else ""
    for gap in block.gaps:
        if gap.low < region.high and region.low < gap.high:
            low, high = max(region.low, gap.low), min(region.high, gap.high)
            what = f"{reader} reads{of_name} bytes {low} to {high} of {block}"
            raise StaleReadError(f"{what}, {gap.why} by {gap.site}")
    if block.tenant != region.generation:
        what = f"{reader} reads{of_name} {block}"
        raise StaleReadError(f"{what}, which another graph of the same pool has overwritten since")


def note_write(region: Region) -> None:
    block = region.block
    block.tenant = region.generation
    if block.gaps:
        block.gaps = [
            gap._replace(low=low, high=high) for gap in block.gaps for low, high in without(gap.low, gap.high, region)
        ]


def without(low: int, high: int, region: Region) -> list[tuple[int, int]]:
    """The parts of a range outside a region."""
    parts = ((low, min(high, region.low)), (max(low, region.high), high))
    return [part for part in parts if part[0] < part[1]]


def _name(actor: int) -> str:
    return "the host's" if actor == HOST else f"stream {actor}'s"


def join(clock: list[int], other: list[int]) -> None:
    for i, time in enumerate(other):
        if time > clock[i]:
            clock[i] = time
