"""The simulated device itself: an asynchronous accelerator made of CPU memory, queues and a seed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from slipstream.config import Hardware
from slipstream.device.interface import Capture, GraphPool
from slipstream.device.interface import Event as EventProtocol
from slipstream.device.interface import Stream as StreamProtocol
from slipstream.device.operation import Operation, TensorSpec, set_launcher
from slipstream.device.sim.aten import Spec
from slipstream.device.sim.check import (
    HOST,
    CaptureError,
    Gap,
    RaceError,
    Region,
    SimError,
    Site,
    call_site,
    join,
    touch,
)
from slipstream.device.sim.graph import Recording, SimGraph, WarmUp
from slipstream.device.sim.memory import Block, Handle, Pool, poison, region_of
from slipstream.device.sim.pinned import SimPinned, plain
from slipstream.device.sim.queue import Event, Op, Pace, Stream
from slipstream.device.sim.tensor import SimTensor, copy
from slipstream.device.sync_guard import SyncGuard

_current: weakref.ref[SimDevice] | None = None
_is_registered = False
_libraries: list[torch.library.Library] = []


class SimDevice:
    """One seed is one course of events: the same program on the same seed runs the same way."""

    name = "sim"
    has_graphs = True

    def __init__(self, seed: int = 0, num_streams: int = 2) -> None:
        global _current
        _register()
        _current = weakref.ref(self)
        self.torch_device = torch.device("sim:0")
        self.sync_guard = SyncGuard(forbidden=True)
        self.recording: Recording | None = None
        self.phase: object = None
        self.clock = [0] * (num_streams + 1)  # what the host knows to be done
        self.streams = [Stream(self, idx + 1) for idx in range(num_streams)]
        for stream in self.streams:
            stream.clock = [0] * (num_streams + 1)
        self.pace = Pace(self.streams, seed)
        self.compute_stream: StreamProtocol = self.streams[0]
        self.copy_stream: StreamProtocol = self.streams[1]
        self.current_stream = self.streams[0]
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
        regions, inners = [], []
        for tensor, writes in ((source, False), (target, True)):
            block = tensor.handle.block if isinstance(tensor, SimTensor) else self._pinned_block(tensor)
            inner = tensor.memory if isinstance(tensor, SimTensor) else plain(tensor)
            region = region_of(inner, block, writes=writes, reads=not writes)
            inners.append(inner)
            if region is not None:
                regions.append(region)
        values, into = inners
        if values.shape != into.shape or values.dtype != into.dtype:
            raise ValueError(f"copy of {tuple(values.shape)} {values.dtype} into {tuple(into.shape)} {into.dtype}")
        site = call_site("copy_async")
        if isinstance(target, SimPinned):
            poison(into)  # what the host reads before the copy has run is not what was there before
            self.push_or_record(Op(lambda: _copy_into(into, values), site, regions))
            return
        # A numpy view that somebody kept writes without being seen; the late copy finds the memory changed.
        expected = values.clone() if isinstance(source, SimPinned) and self.recording is None else None

        def run() -> None:
            if expected is not None and not torch.equal(expected.view(torch.uint8), values.view(torch.uint8)):
                raise RaceError(f"the host changed {regions[0].block} before the copy queued by {site} had read it")
            into.copy_(values)

        self.push_or_record(Op(run, site, regions))

    def poison(self, tensor: Tensor) -> None:
        assert isinstance(tensor, SimTensor)
        region = region_of(tensor.memory, tensor.handle.block, writes=True, reads=False)
        if region is not None:
            inner, site = tensor.memory, call_site("poison")
            self.push_or_record(Op(lambda: poison(inner), site, [region]))
            region.block.gaps.append(Gap(region.low, region.high, "poisoned for this step", site))

    def graph_pool(self) -> GraphPool:
        return Pool(self)

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        self.phase = WarmUp()
        try:
            yield
            self.sync_guard.check(str(call_site("warm_up")))
            self.drain()
        finally:
            self.phase = None

    @contextmanager
    def record(self, pool: GraphPool) -> Iterator[Capture]:
        if self.recording is not None:
            raise CaptureError("a graph is already being recorded")
        assert isinstance(pool, Pool)
        recording = self.recording = Recording(self, pool)
        phase, self.phase = self.phase, recording
        capture = Capture()
        try:
            yield capture
        finally:
            self.recording, self.phase = None, phase
        capture.graph = SimGraph(recording)

    # --- launching --------------------------------------------------------------------------------

    def push_or_record(self, op: Op) -> None:
        if self.recording is not None:
            self.recording.add(op)
        else:
            self.push(op)

    def push(self, op: Op) -> None:
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
                _copy_into(inner, value)

        self.launch(run, name, regions)

    def launch_operation(self, op: Operation[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One of the engine's own operations: its body is one queued operation."""
        bound = op.signature.bind(*args, **kwargs).arguments if kwargs else dict(zip(op.parameters, args, strict=False))
        regions: list[Region] = []
        inner = {name: self._operand(value, name in op.writes, regions, op.name) for name, value in bound.items()}
        specs = op.shape(*args, **kwargs)
        if specs is None:
            self.launch(lambda: op.body(**inner), op.name, regions)
            return None
        outputs = self.allocate_all(specs, op.name)
        self.launch_into(lambda: op.body(**inner), op.name, regions, outputs)
        return outputs

    def _operand(self, value: Any, writes: bool, regions: list[Region], name: str) -> Any:
        if isinstance(value, SimTensor):
            region = region_of(value.memory, value.handle.block, writes=writes, reads=not writes)
            if region is not None:
                regions.append(region)
            return value.memory
        if isinstance(value, Tensor):
            self.sync_guard.check(f"{call_site(name)}: a host tensor among the arguments of a device operation")
        if isinstance(value, (list, tuple)):
            return type(value)(self._operand(part, writes, regions, name) for part in value)
        return value

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
        if self.recording is not None or isinstance(block.origin, Recording) or not block.nbytes:
            return
        stream = self.streams[block.stream_idx - 1]
        raw, site = block.raw, Site(block.site.file, block.site.line, f"the end of {block.site.what}")
        try:
            stream.push(Op(lambda: poison(raw), site, [Region(block, 0, block.nbytes, writes=True, reads=False)]))
        except SimError as error:
            self._late_error = error  # raised by the next call: an error in a destructor would vanish

    def is_pinned(self, tensor: Tensor) -> bool:
        return isinstance(tensor, SimPinned)

    def _pinned_block(self, tensor: Tensor) -> Block:
        block = self._pinned.get(tensor.untyped_storage().data_ptr()) if isinstance(tensor, SimPinned) else None
        if block is None:
            raise SimError(f"{call_site('copy_async')}: memory on the host must be pinned")
        return block

    # --- the host's side --------------------------------------------------------------------------

    def host_access(self, tensor: Tensor, name: str, writes: bool) -> None:
        self.tick()
        region = region_of(plain(tensor), self._pinned_block(tensor), writes=writes, reads=not writes)
        if region is not None:
            self.clock[HOST] += 1
            touch(region, HOST, self.clock[HOST], self.clock, call_site(name))

    def tick(self) -> None:
        """Every call of the host gives the device some time."""
        if self._late_error is not None:
            error, self._late_error = self._late_error, None
            raise error
        self.pace.tick()

    def drain(self) -> None:
        """Wait for everything."""
        self.pace.drain()
        for stream in self.streams:
            join(self.clock, stream.clock)

    def peek(self, tensor: Tensor) -> Tensor:
        """For tests: the values of a tensor once all work is done, whatever the guard says."""
        assert isinstance(tensor, SimTensor)
        self.drain()
        return tensor.memory.clone()

    def refuse_in_recording(self, what: str) -> None:
        if self.recording is not None:
            raise CaptureError(f"{call_site(what)}: cannot be recorded in a graph")


def _flat(value: Any) -> list[Any]:
    return [value] if isinstance(value, Tensor) else list(value)


def _copy_into(inner: Tensor, value: Tensor) -> None:
    if inner.shape != value.shape:
        raise SimError(f"the result has shape {tuple(value.shape)}, announced was {tuple(inner.shape)}")
    inner.copy_(value)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(1, extent)
    return tuple(reversed(strides))


def _register() -> None:
    """Make ``sim`` a device that torch knows. Only where one is made: torch would prefer it over a real accelerator."""
    global _is_registered
    if _is_registered:
        return
    _is_registered = True
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend("sim")
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    _libraries.append(library)  # its registrations last as long as it does

    def empty(size: Sequence[int], *, dtype: torch.dtype | None = None, **_rest: Any) -> Tensor:
        spec = TensorSpec(tuple(size), dtype or torch.get_default_dtype())
        return SimDevice.current().allocate(spec, "empty")

    def empty_strided(
        size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype | None = None, **_rest: Any
    ) -> Tensor:
        spec = Spec(tuple(size), tuple(stride), dtype or torch.get_default_dtype())
        return SimDevice.current().allocate(spec, "empty_strided")

    def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        return copy(target, source, non_blocking)

    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("empty_strided", empty_strided, "PrivateUse1")
    library.impl("_copy_from", copy_from, "PrivateUse1")
    set_launcher("sim", lambda op, args, kwargs: SimDevice.current().launch_operation(op, args, kwargs))


__all__ = ["Handle", "SimDevice"]
