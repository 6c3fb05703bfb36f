"""Compile every Triton kernel for a GPU that need not be there: ``python -m tests.kernels.compile_cases 90``.

The interpreter forgives what a compiler does not. Prints one line for each kernel that does not compile.
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "0"  # overrides what tests/__init__.py has set: kernels are defined below

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from slipstream.kernels.triton_jit import interpreted


class _AbsentGpu:
    """What Triton asks of a driver when it compiles without launching."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def compile_all(capability: int, dtype: torch.dtype) -> list[str]:
    from tests.kernels.triton_cases import CASES
    from tests.kernels.triton_check import prepared
    from tests.sampling.triton_cases import CASES as SAMPLING_CASES

    triton.runtime.driver.set_active(_AbsentGpu(capability))
    run = JITFunction.run
    JITFunction.run = lambda self, *args, **kwargs: run(self, *args, **{**kwargs, "warmup": True})
    failures = []
    for case in (*CASES, *SAMPLING_CASES):
        args, _ = prepared(case.args(), dtype, "cpu")
        try:
            with interpreted():  # takes the Triton path on a CPU's tensors; nothing is interpreted here
                case.op.body(**args)
        except Exception as error:
            failures.append(f"{case.name}: {type(error).__name__}: {error}")
    return failures


if __name__ == "__main__":
    found = compile_all(int(sys.argv[1]), torch.bfloat16)
    print("\n".join(found) or "all compile")
    sys.exit(bool(found))
