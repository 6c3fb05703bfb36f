"""A description of this machine: processor, memory and GPUs. Asks the operating system and imports no torch."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
from pathlib import Path

# Instruction sets that speed up matrix products in 8, 16 or 32 bits.
_INSTRUCTION_SETS = (
    "f16c",
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "sve",
    "sve2",
    "bf16",
    "i8mm",
)


def cpu_name() -> str:
    """The processor's name, without trademark signs."""
    name = _cpuinfo("model name") or platform.processor() or platform.machine() or "unknown CPU"
    return " ".join(re.sub(r"\((R|TM)\)", " ", name, flags=re.IGNORECASE).split())


def num_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def instruction_sets() -> list[str]:
    flags = (_cpuinfo("flags") or _cpuinfo("Features") or "").split()
    return [name for name in _INSTRUCTION_SETS if name in flags]


def memory_bytes() -> int | None:
    with contextlib.suppress(AttributeError, ValueError, OSError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def gpu_names() -> list[str]:
    """NVIDIA GPUs the driver knows of."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        listing = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
        return [line.strip() for line in listing.splitlines() if line.strip()]
    return []


def describe_hardware(device: str) -> str:
    """What a benchmark ran on, e.g. ``Intel Xeon Processor, 2 cores``."""
    if device != "cpu" and (gpus := gpu_names()):
        return gpus[0]
    cores = num_cores()
    return f"{cpu_name()}, {cores} core{'s' if cores > 1 else ''}"


def _cpuinfo(key: str) -> str | None:
    """The first value of a key in Linux's list of processors."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    return None
