"""The CPU as a device: streams run in step with the host, so events are always complete and there are no graphs."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from slipstream.config import Hardware
from slipstream.device.cpu_features import short_name
from slipstream.device.interface import Capture, Event, GraphPool, Stream, Timestamp
from slipstream.device.launches import Recorder
from slipstream.device.sync_guard import NoGuard, SyncGuard

POISON = 0x7FF1
_NOTHING = nullcontext()


class CpuEvent:
    def record(self, stream: Stream) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class CpuStream:
    def wait_event(self, event: Event) -> None:
        pass


class CpuDevice:
    name = "cpu"

    def __init__(self) -> None:
        self.keeps_time, self.runs_beside, self.repeats_launches = True, False, True
        self.sync_guard: SyncGuard = NoGuard()
        self.torch_device = torch.device("cpu")
        self.compute_stream: Stream = CpuStream()
        self.copy_stream: Stream = CpuStream()

    def hardware(self, dtype: str) -> Hardware:
        free, name = free_memory_bytes(), short_name()
        return Hardware(device="cpu", free_memory_bytes=free, dtype_works=dtype_works(dtype), name=name)

    def event(self) -> Event:
        return CpuEvent()

    def timestamp(self) -> Timestamp | None:
        return None

    def seconds_of(self, run: Callable[[], None]) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    def memory_in_use(self) -> int:
        return 0

    def use_stream(self, stream: Stream) -> AbstractContextManager[None]:
        return _NOTHING

    def pinned_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def copy_async(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def poison(self, tensor: torch.Tensor) -> None:
        # In 16-bit units: NaN in every float type, and outside every index range.
        tensor.view(torch.int16).fill_(POISON)

    def graph_pool(self) -> GraphPool:
        raise RuntimeError("a CPU has no graphs")

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        yield

    @contextmanager
    def record(self, pool: GraphPool) -> Iterator[Capture]:
        raise RuntimeError("a CPU has no graphs")
        yield

    @contextmanager
    def record_launches(self) -> Iterator[Capture]:
        capture = Capture()
        with Recorder() as recorder:
            yield capture
        capture.graph = None if recorder.refused else recorder.recording


def free_memory_bytes() -> int:
    """Memory that a new process could use without swapping, within a container's limit."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    limit, used = (_read_number(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current"))
    return free if limit is None or used is None else max(0, min(free, limit - used))


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such file, or its content is "max"
        return None


_PROBE = "import torch; x = torch.ones(4, 64, dtype=torch.{0}); torch.nn.functional.linear(x, x.new_ones(64, 64))"


@functools.cache
def dtype_works(dtype: str) -> bool:
    """Try a matrix product of a 16-bit type in a child process.

    Some virtual machines advertise AMX and kill the process that uses it, which nothing inside the process can catch.
    """
    if dtype not in ("bfloat16", "float16"):
        return True
    return (
        subprocess.run([sys.executable, "-c", _PROBE.format(dtype)], capture_output=True, check=False).returncode == 0
    )
