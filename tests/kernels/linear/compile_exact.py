"""Compile the kernels of ``--exact`` with the tiles of published models, for a GPU that need not be there.

``python -m tests.kernels.linear.compile_exact 90 bfloat16``; prints one line for each kernel that does not compile. A
third argument selects launches by a part of their names: ``attention``, ``gated``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from tests.kernels.compile_cases import _RUN, SHARED_BYTES, _AbsentGpu  # isort: skip; decides how kernels are defined

import torch
import triton
from triton.runtime.jit import JITFunction

from slipstream.kernels.attention.exact_attention import exact_attention
from slipstream.kernels.attention.paged_attention import PagedRequests
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
HEADS = ((9, 3, 64), (32, 8, 128), (8, 4, 256))
NUM_TOKENS = (1, 5, 16, 40, 64, 100)


def launches(dtype: torch.dtype) -> Iterator[tuple[str, Any]]:
    for kind, shapes in SHAPES.items():
        for out_size, in_size in shapes:
            for num_tokens in NUM_TOKENS:
                name = f"{kind} {out_size}x{in_size} for {num_tokens}"
                yield name, lambda sizes=(num_tokens, out_size, in_size), kind=kind: _launch(kind, *sizes, dtype)

    for heads, kv_heads, head_dim in HEADS:
        for num_reqs, query_len, num_tokens in ((1, 1, 1), (2, 5, 10), (200, 1, 200), (3, 0, 300)):
            name = f"attention {heads}/{kv_heads}x{head_dim} for {num_reqs} of {query_len}"
            sizes = (heads, kv_heads, head_dim, num_reqs, query_len, num_tokens)
            yield name, lambda sizes=sizes: _attend(*sizes, dtype)


def _attend(
    heads: int, kv_heads: int, head_dim: int, num_reqs: int, query_len: int, num_tokens: int, dtype: torch.dtype
) -> None:
    q = torch.empty(num_tokens, heads, head_dim, dtype=dtype)
    cache = torch.empty(4, 2, kv_heads, 16, head_dim, dtype=dtype)
    counts = torch.empty(num_reqs, dtype=torch.int32)
    table = torch.empty(num_reqs, 512, dtype=torch.int32)
    requests = PagedRequests(torch.empty(num_reqs + 1, dtype=torch.int32), counts, counts, table)
    for window in (0, 100):
        exact_attention.body(q, cache, requests, 0.1, window, query_len)


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


def compile_all(capability: int, dtype: torch.dtype, part: str = "") -> list[str]:
    triton.runtime.driver.set_active(_AbsentGpu(capability))
    failures, name = [], ""

    def compile_only(self: JITFunction[Any], *args: Any, **kwargs: Any) -> None:
        if "EARLY" in kwargs and capability >= 90:  # as it is launched there; the tensors are a CPU's
            kwargs |= {"EARLY": True, "launch_pdl": True}
        made = _RUN(self, *args, **{**kwargs, "warmup": True}).metadata
        print(name, self.__name__, made.shared, made.num_warps, flush=True)
        if made.shared > SHARED_BYTES[capability]:
            failures.append(f"{name}: {made.shared} bytes of shared memory")

    JITFunction.run = compile_only
    for name, launch in launches(dtype):
        if part not in name:
            continue
        try:
            with interpreted():  # takes the Triton path on a CPU's tensors; nothing is interpreted here
                launch()
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")
    return failures


if __name__ == "__main__":
    found = compile_all(int(sys.argv[1]), getattr(torch, sys.argv[2]), *sys.argv[3:])
    print("\n".join(found) or "all compile")
    sys.exit(bool(found))
