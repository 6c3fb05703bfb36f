"""Every Triton kernel, interpreted on a CPU."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from slipstream.kernels import triton_jit
from tests.kernels.triton_cases import CASES, Case
from tests.kernels.triton_check import check_kernel

pytestmark = pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel_is_its_definition(case: Case, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    check_kernel(case.op, case.args(), dtype, scale=case.scale)


def early_faults(source: str) -> list[str]:
    """What is wrong with the order of kernels that start early, by their text."""
    faults = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef) or function.name in ("wait_for_last", "let_next_start"):
            continue
        calls = [n for n in ast.walk(function) if isinstance(n, ast.Call)]
        lines: dict[str, list[int]] = {}
        for call in calls:
            lines.setdefault(ast.unparse(call.func), []).append(call.lineno)
        if "EARLY" not in [argument.arg for argument in function.args.args]:
            faults += [f"{function.name} waits and is not told whether to"] * ("wait_for_last" in lines)
            continue
        waits, starts = lines.get("wait_for_last", []), lines.get("let_next_start", [])
        writes = [line for name in ("tl.store", "tl.atomic_add") for line in lines.get(name, [])]
        if len(waits) != 1:
            faults.append(f"{function.name} waits {len(waits)} times")
        elif not starts or min(starts) < waits[0]:
            faults.append(f"{function.name} lets the next kernel start before it has waited")
        elif any(line < waits[0] for line in writes):
            faults.append(f"{function.name} writes before it has waited")
    return faults


PACKAGE = Path(triton_jit.__file__).parents[1]
EARLY_FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if "wait_for_last" in path.read_text()]


@pytest.mark.parametrize("path", EARLY_FILES, ids=lambda path: path.stem)
def test_kernels_that_start_early_wait_before_they_write_or_let_others_start(path: Path) -> None:
    """The next kernel counts on everything but its immediate predecessor; the interpreter cannot see it broken."""
    assert early_faults(path.read_text()) == []


WAIT, START = "    wait_for_last(EARLY)\n", "    let_next_start(EARLY)\n"


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        (START + WAIT, "lets the next kernel start before it has waited"),
        (START, "waits 0 times"),
        ("    tl.store(squares, 0.0)\n" + WAIT + START, "writes before it has waited"),
    ],
)
def test_such_faults_are_found(changed: str, fault: str) -> None:
    source = Path(triton_jit.__file__).parent.joinpath("linear", "fused_linear.py").read_text()
    assert source.count(WAIT + START) == 1
    assert early_faults(source.replace(WAIT + START, changed)) == [f"_scale_kernel {fault}"]


def test_powers() -> None:
    assert [triton_jit.next_power_of_2(n) for n in (1, 2, 3, 576, 1024)] == [1, 2, 4, 1024, 1024]
