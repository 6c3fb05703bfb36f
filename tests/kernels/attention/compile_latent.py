"""Compile latent attention of DeepSeek's sizes with the tiles that a GPU would have, which need not be there.

``python -m tests.kernels.attention.compile_latent 90 bfloat16``; ``tests.kernels.compile_cases`` compiles for all GPUs
the tiles of the smallest.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from tests.kernels.compile_cases import _RUN, SHARED_BYTES, _AbsentGpu  # isort: skip; decides how kernels are defined

import torch
import triton
from triton.runtime.jit import JITFunction

from slipstream.kernels.attention import latent_decode, latent_prompt
from slipstream.kernels.attention.latent_tiles import Room
from slipstream.kernels.triton_jit import interpreted
from tests.bundles import bundle
from tests.kernels.triton_cases_latent import of_deepseek
from tests.kernels.triton_check import Case, prepared

BUFFERS = {90: 2, 100: 3}
TENSOR_MEMORY = 512  # columns, of Blackwell


def compile_all(capability: int, dtype: torch.dtype, modules: Iterable[ModuleType], cases: Iterable[Case]) -> list[str]:
    """Modules are those that ask what a GPU has room for."""
    triton.runtime.driver.set_active(_AbsentGpu(capability))
    room = Room(SHARED_BYTES[capability], BUFFERS.get(capability, 1))
    for module in modules:
        module.room_of = lambda _: room  # type: ignore[attr-defined]
    failures = []

    def compile_only(self: JITFunction[Any], *args: Any, **kwargs: Any) -> None:
        made = _RUN(self, *args, **{**kwargs, "warmup": True}).metadata
        fits = made.shared <= room.shared and getattr(made, "tmem_size", 0) <= TENSOR_MEMORY
        if not fits:
            failures.append(f"{self.__name__}: {made.shared} bytes, {made.tmem_size} columns")
        print(self.__name__, made.shared, *(kwargs.get(name) for name in ("BLOCK_M", "BLOCK_K")))

    JITFunction.run = compile_only
    for case in cases:
        args, _ = prepared(case.args(), dtype, "cpu")
        with interpreted():  # takes the Triton path on a CPU's tensors; nothing is interpreted here
            case.op.body(**bundle(case.op, args))
    return failures


if __name__ == "__main__":
    tiled = (latent_decode, latent_prompt)
    found = compile_all(int(sys.argv[1]), getattr(torch, sys.argv[2]), tiled, of_deepseek())
    print("\n".join(found) or "all compile")
    sys.exit(bool(found))
