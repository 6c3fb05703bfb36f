"""C kernels for CPUs: built once with the machine's own compiler, kept in the cache folder, spared where there is none.

torch's operations define every kernel and replace it wherever this library is missing, so only speed depends on a
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from slipstream.config import cache_dir, cpu_instructions
from slipstream.device.cpu_features import cpu_features as cpu_features
from slipstream.device.launches import RecordedLibrary, recorder
from slipstream.errors import ConfigError

_FOLDER = Path(__file__).parent
_FLAGS = ["-O3", "-fopenmp-simd", "-pthread", "-fno-math-errno", "-fno-trapping-math", "-fPIC"]
# What a build may use of the CPU: all it has, or less for trying out what others have.
_MACHINE_FLAGS = {"native": ["-march=native"], "avx2": ["-march=haswell"], "baseline": []}
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
q = ctypes.c_int64
lib.slip_panel_linear(x, q(32), w, 0, None, out, q(1), q(32), q(8), 0, 1)
assert out[7] == sum(range(32))
# One quantised panel for each instruction that a product may use: all codes 1, so that a sum is that of the inputs.
for planes in (0, 2, 3):
    for kind in (8, 9):
        codes, scales, zeros = (ctypes.c_uint8 * 1024)(*[1] * 1024), (f * 16)(*[1.0] * 16), (f * 16)()
        panels = (ctypes.c_uint8 * 1024)()
        lib.slip_pack_codes(kind, codes, scales, zeros, q(16), q(32), q(1), panels, 1)
        segment = (q * 4)(ctypes.addressof(panels), kind, 16, 1)
        matrix = (q * 7)(0, ctypes.addressof(segment), 1, 32, 16, 0, 0)
        assert lib.slip_product(matrix, x, None, out, q(1), planes, 1) == 0
        assert all(abs(out[i] - sum(range(32))) < 0.1 for i in range(16))
"""
# Functions that return a status or a number; the others return nothing.
_WITH_RESULT = {"row_max", "paged_attention", "encoder_attention", "panel_width", "has_byte_products", "decoder_stack"}
_WITH_RESULT |= {"cross_stack", "encoder_stack", "product", "quant_rows", "rotation_and_slots"}

_isa: str | None = None


def use_isa(isa: str) -> None:
    """Which build ``library`` gives from now on: "native", or with less than this CPU has "avx2" or "baseline"."""
    global _isa
    if isa not in _MACHINE_FLAGS:
        raise ConfigError(f"there are no C kernels for '{isa}'; choose {', '.join(_MACHINE_FLAGS)}")
    _isa = isa


def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they cannot be had."""
    if _isa is None:
        use_isa(cpu_instructions())
    assert _isa is not None
    found, own = _library(_isa), recorder()
    return found if found is None or own is None else cast(ctypes.CDLL, RecordedLibrary(found, own))


@functools.cache
def _library(isa: str) -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        path = _built(isa)
        return None if path is None else _declared(ctypes.CDLL(str(path)))
    except (OSError, subprocess.SubprocessError):
        return None


def _declared(lib: ctypes.CDLL) -> ctypes.CDLL:
    """Tell ctypes the arguments, so that plain integers pass as addresses and sizes at little cost."""
    p, n, f, i = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
    lib.slip_rms_norm.argtypes = [p, p, f, p, n, n]
    lib.slip_add_rms_norm.argtypes = [p, p, p, f, p, p, n, n]
    lib.slip_swiglu.argtypes = [p, p, n, n]
    lib.slip_rope_and_cache.argtypes = [p, n, p, n, p, n, *[p] * 6, *[n] * 6, i]
    lib.slip_paged_attention.argtypes = [*[p] * 8, *[n] * 6, f, n, i, i, i, i]
    lib.slip_encoder_attention.argtypes = [*[p] * 7, *[n] * 7, f, i]
    lib.slip_cross_stack.argtypes = [p, n, p, p, p]
    lib.slip_encoder_stack.argtypes = [p, n, p, p, p, n, i]
    lib.slip_panel_linear.argtypes = [p, n, p, i, p, p, n, n, n, i, i]
    lib.slip_panel_width.restype = n
    lib.slip_row_max.argtypes = [p, n, n, p, p, p, i]
    lib.slip_place_maxima.argtypes = [*[p] * 4, n, n]
    lib.slip_keep_states.argtypes = [p, n, p, p, n, n, n, n]
    lib.slip_mask_rows.argtypes = [p, p, p, p, n, n, n]
    lib.slip_decoder_stack.argtypes = [p, n, p, p, p, p]
    lib.slip_product.argtypes = [p, p, p, p, n, i, i]
    lib.slip_use_large_pages.argtypes = [p, n]
    lib.slip_pack_gguf.argtypes = [i, p, p, n, n, p, i]
    lib.slip_pack_codes.argtypes = [i, *[p] * 3, n, n, n, p, i]
    lib.slip_quant_rows.argtypes = [p, p, n, p, i]
    lib.slip_join_states.argtypes = [p, n, p, p, p, p, p, f, p, n, n]
    lib.slip_prepare_inputs.argtypes = [p] * 4
    lib.slip_commit.argtypes = [p] * 3
    lib.slip_accept_drafts.argtypes = [*[p] * 8, n, n]
    lib.slip_place_drafts.argtypes = [p, p, p, n, n]
    lib.slip_mark_gaps.argtypes = [p, p, i, n, p, p]
    lib.slip_prepare_first_pass.argtypes = [p, p, p, n, p, p]
    lib.slip_prepare_shifted_pass.argtypes = [p, p, p, p, n, p]
    lib.slip_prepare_next_pass.argtypes = [p, p, n, p, n, n, p, p]
    lib.slip_rotation_and_slots.argtypes = [p]
    for name, function in vars(lib).items():
        if name.startswith("slip_") and name.removeprefix("slip_") not in _WITH_RESULT:
            function.restype = None
    return lib


def _built(isa: str) -> Path | None:
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        return None
    flags = [*_FLAGS, *_MACHINE_FLAGS[isa]]
    target = cache_dir() / "native" / f"kernels-{_build_key(flags)}.so"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as folder:
        sources = sorted(_FOLDER.glob("*.c"))
        objects = [str(Path(folder) / f"{source.stem}.o") for source in sources]
        commands = [
            [compiler, *flags, "-c", str(source), "-o", made] for source, made in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            list(threads.map(_run, commands))
        made = Path(folder) / "kernels.so"
        _run([compiler, "-shared", "-pthread", *objects, "-o", str(made), "-lm"])
        _run([sys.executable, "-c", _PROBE, str(made)])
        os.replace(made, target)  # noqa: PTH105  both in one folder, so that the rename is atomic
    return target


def _build_key(flags: list[str]) -> str:
    # A home folder may be shared by different machines: what is built for one CPU is not for another.
    sources = [path.read_text(encoding="utf-8") for path in sorted(_FOLDER.glob("*.[ch]"))]
    return hashlib.sha256("\0".join([*sources, *flags, platform.machine(), cpu_features()]).encode()).hexdigest()[:16]


def instructions_in_use() -> str:
    """Of the kernels: they may round in another way than others, or than torch where there are none."""
    if _isa is None:
        use_isa(cpu_instructions())
    return "torch" if library() is None else str(_isa)


def _run(command: list[str]) -> None:
    subprocess.run(command, capture_output=True, check=True, timeout=600)


def usable(x: Tensor) -> ctypes.CDLL | None:
    """The kernels, if they take this tensor and its likes."""
    return library() if x.dtype is torch.float32 and x.is_cpu else None
