"""Keys and values of 16 bits are read and rounded alike on all machines; those that are not here are emulated."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from slipstream.kernels import native

_FLAGS = ["-O2", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-static"]
_SOURCE = Path(__file__).with_name("cached_numbers.c")


def numbers(folder: Path, compiler: str, *flags: str, emulator: tuple[str, ...] = ()) -> list[str]:
    program = str(folder / f"numbers-{compiler}{''.join(flags)}")
    command = [compiler, *_FLAGS, *flags, f"-I{Path(native.__file__).parent}", str(_SOURCE), "-o", program, "-lm"]
    subprocess.run(command, check=True, timeout=100)
    found = subprocess.run([*emulator, program], check=True, timeout=100, capture_output=True, text=True)
    return found.stdout.splitlines()


@pytest.mark.parametrize(
    ("compiler", "flags", "emulator"),
    [
        ("gcc", ("-march=haswell",), ()),
        ("gcc", ("-mavx",), ()),
        ("gcc", ("-march=native",), ()),
        ("aarch64-linux-gnu-gcc", (), ("qemu-aarch64",)),
    ],
    ids=["avx2", "avx", "native", "neon"],
)
def test_the_same_bits(compiler: str, flags: tuple[str, ...], emulator: tuple[str, ...], tmp_path: Path) -> None:
    if any(shutil.which(tool) is None for tool in ("gcc", compiler, *emulator[:1])):
        pytest.skip(f"{compiler} or {' '.join(emulator)} is not installed")
    if not emulator and " avx2 " not in native.cpu_features():
        pytest.skip("no AVX2 here")
    plain = numbers(tmp_path, "gcc")
    assert [line.split()[1] for line in plain if len(line.split()) == 3] == ["1", "1"], "a vector is as its numbers"
    assert numbers(tmp_path, compiler, *flags, emulator=emulator) == plain
