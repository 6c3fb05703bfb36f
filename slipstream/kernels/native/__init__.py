"""C kernels for CPUs: built once with the machine's own compiler, kept in the cache folder, spared where there is none.

torch's operations define every kernel and stand in wherever this library is missing, so only speed depends on a
compiler. A fresh build is tried in a child process first: an instruction that the CPU advertises but does not have
would kill the process that runs it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from slipstream.config import cache_dir

_SOURCE = Path(__file__).with_name("kernels.c")
_FLAGS = [
    "-O3",
    "-march=native",
    "-fopenmp-simd",
    "-pthread",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
]
_PROBE = """
import ctypes, sys
f = ctypes.c_float
lib = ctypes.CDLL(sys.argv[1])
x, w, out = (f * 96)(*range(96)), (f * 48)(*[1.0] * 48), (f * 48)()
lib.slip_rms_norm(x, w, f(1e-5), out, ctypes.c_int64(1), ctypes.c_int64(48))
assert abs(sum(v * v for v in out) - 48) < 1e-2
lib.slip_swiglu(x, out, ctypes.c_int64(1), ctypes.c_int64(48))
assert out[0] == 0.0
w = (f * 4096)(*[1.0] * 4096)
lib.slip_panel_linear(x, w, None, out, *map(ctypes.c_int64, (1, 32, 8)), ctypes.c_int(0), ctypes.c_int(1))
assert out[7] == sum(range(32))
"""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they cannot be had."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        path = _built()
        return None if path is None else _declared(ctypes.CDLL(str(path)))
    except (OSError, subprocess.SubprocessError):
        return None


def _declared(lib: ctypes.CDLL) -> ctypes.CDLL:
    """Tell ctypes the arguments, so that plain integers pass as addresses and sizes at little cost."""
    p, n, f, i = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
    lib.slip_rms_norm.argtypes = [p, p, f, p, n, n]
    lib.slip_add_rms_norm.argtypes = [p, p, p, f, p, p, n, n]
    lib.slip_swiglu.argtypes = [p, p, n, n]
    lib.slip_rope_and_cache.argtypes = [p, n, p, n, p, n, *[p] * 6, *[n] * 6]
    lib.slip_paged_attention.argtypes = [*[p] * 8, *[n] * 6, f, n, i]
    lib.slip_panel_linear.argtypes = [*[p] * 4, n, n, n, i, i]
    lib.slip_panel_width.restype = n
    lib.slip_row_max.argtypes = [p, n, n, p, p, i]
    lib.slip_decoder_stack.argtypes = [p, n, p, p, p, p]
    return lib


def _built() -> Path | None:
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        return None
    # A home folder may be shared by different machines: what is built for one CPU is not for another.
    cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    flags = "".join(line for line in cpu.splitlines() if line.startswith(("flags", "model name", "Features")))
    key = hashlib.sha256("\0".join([_SOURCE.read_text(), *_FLAGS, platform.machine(), flags]).encode()).hexdigest()[:16]
    target = cache_dir() / "native" / f"kernels-{key}.so"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as folder:
        made = Path(folder) / "kernels.so"
        for command in (
            [compiler, *_FLAGS, str(_SOURCE), "-o", str(made), "-lm"],
            [sys.executable, "-c", _PROBE, str(made)],
        ):
            subprocess.run(command, capture_output=True, check=True, timeout=120)
        os.replace(made, target)  # noqa: PTH105  both in one folder, so that the rename is atomic
    return target


def usable(x: Tensor) -> ctypes.CDLL | None:
    """The kernels, if they take this tensor and its likes."""
    return library() if x.dtype is torch.float32 and x.is_cpu else None
