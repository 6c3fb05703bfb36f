"""Products with quantised weights are the same to the bit on all machines; those that are not here are emulated."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from slipstream.kernels import native

_FLAGS = ["-O2", "-fopenmp-simd", "-pthread", "-fno-math-errno", "-fno-trapping-math", "-static"]
_FOLDER = Path(native.__file__).parent


def products(folder: Path, compiler: str, *flags: str, emulator: tuple[str, ...] = ()) -> str:
    program = folder / f"products-{compiler}{''.join(flags)}"
    sources = [str(path) for path in (*sorted(_FOLDER.glob("*.c")), Path(__file__).with_name("quant_products.c"))]
    command = [compiler, *_FLAGS, *flags, f"-I{_FOLDER}", *sources, "-o", str(program), "-lm"]
    subprocess.run(command, check=True, timeout=250)
    return subprocess.run([*emulator, str(program)], check=True, timeout=250, capture_output=True, text=True).stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiler", "flags", "emulator"),
    [
        ("gcc", ("-march=haswell",), ()),
        ("gcc", (), ()),
        ("aarch64-linux-gnu-gcc", (), ("qemu-aarch64",)),
        ("aarch64-linux-gnu-gcc", ("-march=armv8.2-a+i8mm",), ("qemu-aarch64", "-cpu", "max")),
    ],
    ids=["avx2", "plain", "neon", "neon-i8mm"],
)
def test_the_same_bits(compiler: str, flags: tuple[str, ...], emulator: tuple[str, ...], tmp_path: Path) -> None:
    if any(shutil.which(tool) is None for tool in ("gcc", compiler, *emulator[:1])):
        pytest.skip(f"{compiler} or {' '.join(emulator)} is not installed")
    if not emulator and flags and " avx2 " not in native.cpu_features():
        pytest.skip("no AVX2 here")
    expected = products(tmp_path, "gcc", "-march=native")
    assert "nan" not in expected
    assert products(tmp_path, compiler, *flags, emulator=emulator) == expected
