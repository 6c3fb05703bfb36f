"""Compile the products of ``--exact`` with the tiles of published models, for a GPU that need not be there.

``python -m tests.kernels.linear.compile_exact 90 bfloat16``; prints one line for each kernel that does not compile.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from tests.kernels.compile_cases import _RUN, SHARED_BYTES, _AbsentGpu  # isort: skip; decides how kernels are defined

import torch
import triton
from triton.runtime.jit import JITFunction

from slipstream.kernels.linear.exact_linear import Tokens, exact_linear, exact_linear_scaled
from slipstream.kernels.linear.small_linear import Epilogue
from slipstream.kernels.triton_jit import interpreted

# Outputs (of a gated product: of one half) and inputs, of SmolLM2, Llama-3.1-8B and Qwen3-30B-A3B.
SHAPES = {
    "norm": ((960, 576), (6144, 4096), (5120, 2048)),
    "add": ((576, 576), (576, 1536), (4096, 4096), (4096, 14336), (2048, 4096)),
    "gated": ((1536, 576), (14336, 4096)),
    "head": ((49152, 576), (128256, 4096)),
}
NUM_TOKENS = (1, 5, 16, 40, 64, 100)


def launches(dtype: torch.dtype) -> Iterator[tuple[str, Any]]:
    for kind, shapes in SHAPES.items():
        for out_size, in_size in shapes:
            for num_tokens in NUM_TOKENS:
                name = f"{kind} {out_size}x{in_size} for {num_tokens}"
                yield name, lambda sizes=(num_tokens, out_size, in_size), kind=kind: _launch(kind, *sizes, dtype)


def _launch(kind: str, num_tokens: int, out_size: int, in_size: int, dtype: torch.dtype) -> None:
    # Nothing is computed: the memory is never touched.
    x = torch.empty(num_tokens, in_size, dtype=dtype)
    weight = torch.empty(out_size * (2 if kind == "gated" else 1), in_size, dtype=dtype)
    squares = torch.empty(num_tokens, -(-in_size // 64), dtype=torch.int64)
    if kind == "add":
        residual, gain = torch.empty(num_tokens, out_size, dtype=dtype), torch.empty(out_size, dtype=dtype)
        exact_linear_scaled.body(Tokens(x), weight, Epilogue(None, residual, gain))
    elif kind == "head":
        exact_linear.body(Tokens(x), weight, Epilogue(), True)
    else:
        end = Epilogue(activation="silu" if kind == "gated" else "")
        exact_linear.body(Tokens(x, squares, 1e-5), weight, end)


def compile_all(capability: int, dtype: torch.dtype) -> list[str]:
    triton.runtime.driver.set_active(_AbsentGpu(capability))
    failures, name = [], ""

    def compile_only(self: JITFunction[Any], *args: Any, **kwargs: Any) -> None:
        if capability >= 90:
            kwargs |= {"EARLY": True, "launch_pdl": True}
        made = _RUN(self, *args, **{**kwargs, "warmup": True}).metadata
        print(name, self.__name__, made.shared, made.num_warps, flush=True)
        if made.shared > SHARED_BYTES[capability]:
            failures.append(f"{name}: {made.shared} bytes of shared memory")

    JITFunction.run = compile_only
    for name, launch in launches(dtype):
        try:
            with interpreted():  # takes the Triton path on a CPU's tensors; nothing is interpreted here
                launch()
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")
    return failures


if __name__ == "__main__":
    found = compile_all(int(sys.argv[1]), getattr(torch, sys.argv[2]))
    print("\n".join(found) or "all compile")
    sys.exit(bool(found))
