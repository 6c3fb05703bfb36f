"""The CPU's name and abilities, as the operating system states them. Imports no torch."""

from __future__ import annotations

import functools
import hashlib
import platform
import sys
from pathlib import Path


def cpu_features() -> str:
    """The CPU's name and the names of its abilities, between spaces; of Linux alone."""
    cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    lines = [line for line in cpu.splitlines() if line.startswith(("flags", "model name", "Features"))]
    return " ".join([*lines, ""])


@functools.cache
def short_name() -> str:
    """The same for CPUs of one kind, and another one for others."""
    features = cpu_features() if sys.platform.startswith("linux") else platform.processor()
    return f"{platform.machine()} {hashlib.sha256(features.encode()).hexdigest()[:12]}"
