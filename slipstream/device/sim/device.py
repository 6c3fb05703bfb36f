"""The simulated device: an asynchronous accelerator made of CPU memory, queues and a seed."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from slipstream.config import Hardware
from slipstream.device.interface import Capture, GraphPool, Timestamp
from slipstream.device.interface import Event as EventProtocol
from slipstream.device.interface import Stream as StreamProtocol
from slipstream.device.operation import Operation, TensorSpec, map_tensors
from slipstream.device.sim.aten import Spec
from slipstream.device.sim.check import (
    HOST,
    CaptureError,
    Gap,
    Region,
    SimError,
    Site,
    call_site,
    join,
    touch,
)
from slipstream.device.sim.copies import copy_announced, late_copy
from slipstream.device.sim.graph import Recording, SimGraph, WarmUp
from slipstream.device.sim.memory import Block, Pool, poison, region_of
from slipstream.device.sim.pinned import SimPinned, plain
from slipstream.device.sim.queue import Event, Op, Pace, Stream
from slipstream.device.sim.registration import register
from slipstream.device.sim.tensor import SimTensor
from slipstream.device.sync_guard import SyncGuard

_current: weakref.ref[SimDevice] | None = None


class SimDevice:
    """Deterministic by seed: the same program with the same seed runs the same way."""

    name = "sim"

    def __init__(self, seed: int = 0, num_streams: int = 2) -> None:
        global _current
        register(SimDevice.current)
        _current = weakref.ref(self)
        self.torch_device = torch.device("sim:0")
        self.sync_guard = SyncGuard(forbidden=True)
        self.keeps_time, self.runs_beside, self.repeats_launches = False, True, False
        self.recording: Recording | None = None
        self.phase: object = None
        self.clock = [0] * (num_streams + 1)  # what the host knows to be complete
        self.streams = [Stream(self, idx + 1) for idx in range(num_streams)]
        for stream in self.streams:
            stream.clock = [0] * (num_streams + 1)
        self.pace = Pace(self.streams, seed)
        self.compute_stream: StreamProtocol = self.streams[0]
        self.copy_stream: StreamProtocol = self.streams[1]
        self.current_stream = self.streams[0]
        self._costs = random.Random(seed)
        self._pool = Pool(self)
        self._pinned: dict[int, Block] = {}
        self._late_error: SimError | None = None
        self.num_launched = 0

    @staticmethod
    def current() -> SimDevice:
        device = None if _current is None else _current()
        if device is None:
            raise SimError("there is no simulated device")
        return device

    # --- the device interface ---------------------------------------------------------------------

    def hardware(self, dtype: str) -> Hardware:
        return Hardware(device="sim", free_memory_bytes=1 << 30, dtype_works=True)

    def event(self) -> EventProtocol:
        return Event(self)

    def timestamp(self) -> Timestamp | None:
        return None  # simulated time is meaningless

    def seconds_of(self, run: Callable[[], None]) -> float:
        run()
        return self._costs.uniform(0.5, 2.0)  # random, so that no code relies on relative costs

    def memory_in_use(self) -> int:
        return 0

    @contextmanager
    def use_stream(self, stream: StreamProtocol) -> Iterator[None]:
        assert isinstance(stream, Stream)
        before, self.current_stream = self.current_stream, stream
        try:
            yield
        finally:
            self.current_stream = before

    def pinned_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self.refuse_in_recording("pinned_empty")
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        block = Block(nbytes, "pinned", call_site("pinned_empty"))
        block.gaps = [Gap(0, nbytes, "allocated and never written", block.site)]
        with torch.inference_mode(False):
            inner = block.tensor(tuple(shape), _contiguous(shape), dtype)
            made = torch.Tensor._make_subclass(SimPinned, inner)
        self._pinned[inner.untyped_storage().data_ptr()] = block
        return made

    def copy_async(self, target: Tensor, source: Tensor) -> None:
        self.push_or_record(late_copy(self, target, source))

    def poison(self, tensor: Tensor) -> None:
        assert isinstance(tensor, SimTensor)
        self.refuse_in_recording("poison")  # a replay could not mark memory as poisoned
        region = self.region(tensor, writes=True)
        if region is not None:
            inner, site = tensor.memory, call_site("poison")
            self.push(Op(lambda: poison(inner), site, [region]))
            region.block.gaps.append(Gap(region.low, region.high, "poisoned for this step", site))

    def graph_pool(self) -> GraphPool:
        return Pool(self)

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        self.refuse_in_recording("warm_up")
        self.phase = WarmUp()
        try:
            yield
            self.wait_for_all("warm_up")
        finally:
            self.phase = None

    @contextmanager
    def record(self, pool: GraphPool) -> Iterator[Capture]:
        self.refuse_in_recording("record")
        assert isinstance(pool, Pool)
        recording = self.recording = Recording(self, pool)
        phase, self.phase = self.phase, recording
        capture = Capture()
        try:
            yield capture
        finally:
            self.recording, self.phase = None, phase
        capture.graph = SimGraph(recording)

    def record_launches(self) -> AbstractContextManager[Capture]:
        raise RuntimeError("the simulated device has graphs")

    # --- launching --------------------------------------------------------------------------------

    def push_or_record(self, op: Op) -> None:
        if self.recording is not None:
            self.recording.add(op)
        else:
            self.push(op)

    def push(self, op: Op) -> None:
        self.raise_late_error()
        self.num_launched += 1
        self.current_stream.push(op)
        self.tick()

    def launch(self, run: Callable[[], Any], name: str, regions: Sequence[Region]) -> None:
        self.push_or_record(Op(run, call_site(name), regions))

    def launch_into(self, compute: Callable[[], Any], name: str, regions: list[Region], outputs: Any) -> None:
        """Queue a computation whose results go to memory allocated now."""
        targets = _flat(outputs)
        inners = [target.memory for target in targets]
        for target in targets:
            region = region_of(target.memory, target.handle.block, writes=True, reads=False)
            if region is not None:
                regions.append(region)

        def run() -> None:
            for inner, value in zip(inners, _flat(compute()), strict=True):
                copy_announced(inner, value)

        self.launch(run, name, regions)

    def launch_operation(self, op: Operation[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One of the engine's operations: its body is one queued operation."""
        regions: list[Region] = []

        def on_device(name: str, tensor: Tensor) -> Tensor:
            return self._operand(tensor, name, op, regions)

        arguments = op.bind(args, kwargs)
        inner = {name: map_tensors(value, name, on_device) for name, value in arguments.items()}
        specs = op.specs(arguments)
        if specs is None:
            self.launch(lambda: op.body(**inner), op.name, regions)
            return None
        outputs = self.allocate_all(specs, op.name)
        self.launch_into(lambda: op.body(**inner), op.name, regions, outputs)
        return outputs

    def _operand(self, tensor: Tensor, name: str, op: Operation[Any, Any], regions: list[Region]) -> Tensor:
        """The memory that the body works on. What it does to it is noted under the argument's name."""
        if not isinstance(tensor, SimTensor):
            site = call_site(op.name)
            self.sync_guard.check(f"{site}: {name}, a host tensor among the arguments of a device operation,")
            return tensor
        writes = op.changes(name)
        region = region_of(tensor.memory, tensor.handle.block, writes=writes, reads=not writes)
        if region is not None:
            regions.append(region._replace(name=name))
        return tensor.memory

    # --- memory -----------------------------------------------------------------------------------

    def allocate(self, spec: Spec | TensorSpec, name: str) -> SimTensor:
        stride = spec.stride if isinstance(spec, Spec) else _contiguous(spec.shape)
        span = 1 + sum((extent - 1) * step for extent, step in zip(spec.shape, stride, strict=True))
        nbytes = 0 if 0 in spec.shape else span * spec.dtype.itemsize
        pool = self._pool if self.recording is None else self.recording.pool
        handle = pool.take(nbytes, call_site(name))
        with torch.inference_mode(False):
            return SimTensor(handle.block.tensor(spec.shape, stride, spec.dtype), handle, self)

    def allocate_all(self, specs: Any, name: str) -> Any:
        if isinstance(specs, Spec | TensorSpec):
            return self.allocate(specs, name)
        return tuple(self.allocate_all(spec, name) for spec in specs)

    def on_free(self, block: Block) -> None:
        """In stream order, so that work queued before still finds its values, and work of other streams does not."""
        if isinstance(block.origin, Recording) or not block.nbytes:
            return
        stream = self.streams[block.stream_idx - 1]
        raw, site = block.raw, Site(block.site.file, block.site.line, f"the end of {block.site.what}")
        try:
            region = Region(block, 0, block.nbytes, writes=True, reads=False, generation=block.generation)
            stream.push(Op(lambda: poison(raw), site, [region]))
        except SimError as error:
            # Raised by the next call: a destructor's error is lost. Without its stack, which would keep memory alive.
            self._late_error = self._late_error or error.with_traceback(None)

    def is_pinned(self, tensor: Tensor) -> bool:
        return plain(tensor).untyped_storage().data_ptr() in self._pinned

    def region(self, tensor: Tensor, writes: bool) -> Region | None:
        if isinstance(tensor, SimTensor):
            return region_of(tensor.memory, tensor.handle.block, writes=writes, reads=not writes)
        inner = plain(tensor)
        block = self._pinned.get(inner.untyped_storage().data_ptr())
        if block is None:
            raise SimError(f"{call_site('copy_async')}: memory on the host must be pinned")
        return region_of(inner, block, writes=writes, reads=not writes)

    # --- the host's side --------------------------------------------------------------------------

    def host_access(self, region: Region | None, name: str) -> None:
        """The host reads or writes pinned memory, or device memory that it has waited for."""
        self.tick()
        if region is not None:
            self.clock[HOST] += 1
            touch(region, HOST, self.clock[HOST], self.clock, call_site(name))

    def host_values(self, tensor: Tensor, name: str) -> Tensor:
        """The current content of a host tensor."""
        if self.is_pinned(tensor):
            self.host_access(self.region(tensor, writes=False), name)
        return plain(tensor).clone()

    def tick(self) -> None:
        """Every call of the host gives the device some time to run."""
        self.raise_late_error()
        self.pace.tick()

    def raise_late_error(self) -> None:
        if self._late_error is not None:
            error, self._late_error = self._late_error, None
            raise error

    def wait_for_all(self, what: str) -> None:
        self.refuse_in_recording(what)
        self.sync_guard.check(str(call_site(what)))
        self.drain()

    def drain(self) -> None:
        """Wait for everything, without the guard."""
        self.raise_late_error()
        self.pace.drain()
        for stream in self.streams:
            join(self.clock, stream.clock)

    def peek(self, tensor: Tensor) -> Tensor:
        """For tests: the values of a tensor once all work is complete, without the guard."""
        assert isinstance(tensor, SimTensor)
        self.drain()
        return tensor.memory.clone()

    def refuse_in_recording(self, what: str) -> None:
        if self.recording is not None:
            raise CaptureError(f"{call_site(what)}: cannot be recorded in a graph")


def _flat(value: Any) -> list[Any]:
    return [value] if isinstance(value, Tensor) else list(value)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(1, extent)
    return tuple(reversed(strides))
