"""An NVIDIA GPU as a device: torch's streams, events and graphs, and the guard against hidden synchronisation."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib.util import find_spec
from typing import Any

import torch

from slipstream.config import Hardware, sync_check_enabled
from slipstream.device.cpu import POISON
from slipstream.device.interface import Capture, Event, GraphPool, Stream, Timestamp
from slipstream.device.sync_guard import CudaSyncGuard, NoGuard, SyncGuard
from slipstream.errors import ConfigError

_OLDEST = (8, 0)  # Ampere: the first with bfloat16 in its matrix units


def is_usable() -> bool:
    """Whether there is a GPU that supports the kernels. Creates no context."""
    return torch.cuda.is_available() and find_spec("triton") is not None


class _StreamScope:
    """``torch.cuda.stream`` for one device, without the check for others, which takes longer than the switch."""

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._before = torch.cuda.current_stream()
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *_error: object) -> None:
        torch.cuda.set_stream(self._before)


class CudaDevice:
    name = "cuda"

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ConfigError("device cuda needs an NVIDIA GPU and a torch built for it; use device cpu")
        if find_spec("triton") is None:
            raise ConfigError("device cuda needs Triton, which is not installed; install triton or use device cpu")
        capability = torch.cuda.get_device_capability()
        if capability < _OLDEST:
            raise ConfigError(
                f"{torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]}; "
                "8.0 (Ampere) or newer is needed, or device cpu"
            )
        self.keeps_time, self.runs_beside, self.repeats_launches = True, True, False
        self.sync_guard: SyncGuard = CudaSyncGuard() if sync_check_enabled() else NoGuard()
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        # The default stream synchronises with others; graphs cannot be captured on it.
        compute: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        copy: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._clock: tuple[Any, float] | None = None
        self.compute_stream: Stream = compute
        self.copy_stream: Stream = copy

    def hardware(self, dtype: str) -> Hardware:
        free, total = torch.cuda.mem_get_info()
        capability = torch.cuda.get_device_capability()
        sizes = {"free_memory_bytes": free, "total_memory_bytes": total}
        name = torch.cuda.get_device_name()
        return Hardware("cuda", dtype_works=True, capability=capability, name=name, **sizes)

    def event(self) -> Event:
        made: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return made  # type: ignore[no-any-return]

    def timestamp(self) -> Timestamp | None:
        if self._clock is None:
            # Once, before the first step: aligns the two clocks.
            zero: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            zero.record()
            zero.synchronize()
            self._clock = (zero, time.monotonic())
        zero, zero_s = self._clock
        here: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        here.record()

        def seconds() -> float:
            here.synchronize()
            return zero_s + float(zero.elapsed_time(here)) / 1000

        return seconds

    def seconds_of(self, run: Callable[[], None]) -> float:
        begin: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    def memory_in_use(self) -> int:
        free, total = torch.cuda.mem_get_info()
        return total - free

    def use_stream(self, stream: Any) -> AbstractContextManager[None]:
        return _StreamScope(stream)

    def pinned_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def copy_async(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def poison(self, tensor: torch.Tensor) -> None:
        tensor.view(torch.int16).fill_(POISON)

    def graph_pool(self) -> GraphPool:
        handle: Any = torch.cuda.graph_pool_handle()
        return handle  # type: ignore[no-any-return]

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        yield
        torch.cuda.synchronize()

    @contextmanager
    def record(self, pool: Any) -> Iterator[Capture]:
        """Without the full garbage collection of ``torch.cuda.graph``, which takes longer than a capture.

        The collector must not run during capture either, since freeing objects may query events.
        """
        capture, graph = Capture(), torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()
        try:
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                yield capture
            except BaseException:
                with suppress(RuntimeError):  # the first error is more useful
                    graph.capture_end()
                raise
            graph.capture_end()
        finally:
            if collects:
                gc.enable()
        capture.graph = graph

    def record_launches(self) -> AbstractContextManager[Capture]:
        raise RuntimeError("a GPU has graphs")
