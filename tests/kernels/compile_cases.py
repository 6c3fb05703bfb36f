"""Compile every Triton kernel for a GPU that need not be there: ``python -m tests.kernels.compile_cases 90 bfloat16``.

The interpreter forgives what a compiler does not. Prints one line for each kernel that does not compile. A number
after the type is how many variants of each kernel are compiled at most; those of Qwen3-Next's layers come on top.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # overrides what tests/__init__.py has set: kernels are defined below

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from slipstream.kernels.triton_jit import interpreted

# What one program may have: Ampere's large one, Ada, Hopper, Blackwell's large and small one.
SHARED_BYTES = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}


_RUN = JITFunction.run


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


def compile_all(capability: int, dtype: torch.dtype, most: int) -> list[str]:
    from tests.bundles import bundle
    from tests.kernels.triton_cases import CASES
    from tests.kernels.triton_cases_delta import of_qwen3_next
    from tests.kernels.triton_check import prepared
    from tests.sampling.triton_cases import CASES as SAMPLING_CASES
    from tests.speculate.triton_cases import CASES as SPECULATE_CASES

    triton.runtime.driver.set_active(_AbsentGpu(capability))
    failures, limit = [], most

    def compile_only(self: JITFunction[Any], *args: Any, **kwargs: Any) -> None:
        if len(self.device_caches[0][0]) >= limit:
            return
        if "EARLY" in kwargs and capability >= 90:  # as it is launched there; the tensors are a CPU's
            kwargs |= {"EARLY": True, "launch_pdl": True}
        kernel = _RUN(self, *args, **{**kwargs, "warmup": True})
        # A launch would find out; the compiler does not look.
        if kernel.metadata.shared > SHARED_BYTES[capability]:
            raise MemoryError(f"{kernel.metadata.shared} bytes of shared memory")

    JITFunction.run = compile_only
    for case in (*CASES, *SAMPLING_CASES, *SPECULATE_CASES, *of_qwen3_next()):
        limit = sys.maxsize if "qwen3-next" in case.name or "widest-head" in case.name else most
        args, _ = prepared(case.args(), dtype, "cpu")
        try:
            with interpreted():  # takes the Triton path on a CPU's tensors; nothing is interpreted here
                case.op.body(**bundle(case.op, args))
        except Exception as error:
            failures.append(f"{case.name} in {dtype}: {type(error).__name__}: {error}")
    return failures


if __name__ == "__main__":
    most = int(sys.argv[3]) if len(sys.argv) > 3 else sys.maxsize
    found = compile_all(int(sys.argv[1]), getattr(torch, sys.argv[2]), most)
    print("\n".join(found) or "all compile")
    sys.exit(bool(found))
