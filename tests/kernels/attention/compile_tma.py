"""Compile prompt attention with TMA for a GPU that need not be there.

    python -m tests.kernels.attention.compile_tma 90 bfloat16 [how many tiles of each size]

For each head size, page and tile that a tuner tries, the instructions that are in its code are printed, and the shared
memory. Exits with 1 where tensor cores or TMA are missing, or a tile does not fit.
"""

from __future__ import annotations

import sys
from typing import Any

from tests.kernels.compile_cases import _RUN, SHARED_BYTES, _AbsentGpu  # isort: skip; decides how kernels are defined

import torch
import triton
from triton.runtime.jit import JITFunction

from slipstream.kernels.attention.paged_attention import PagedRequests
from slipstream.kernels.attention.tma_attention import launch_tma, prompt_tiles

NEEDED = {
    90: ("wgmma.mma_async", "cp.async.bulk.tensor"),
    100: ("tcgen05.mma", "cp.async.bulk.tensor"),
    120: ("mma.sync", "cp.async.bulk.tensor"),
}


def compile_all(capability: int, dtype: torch.dtype, most: int) -> list[str]:
    triton.runtime.driver.set_active(_AbsentGpu(capability))
    failures: list[str] = []
    about = ""

    def compile_only(self: JITFunction[Any], *args: Any, **kwargs: Any) -> None:
        made = _RUN(self, *args, **{**kwargs, "warmup": True})
        ptx = made.asm["ptx"]
        missing = [name for name in NEEDED.get(capability, ()) if name not in ptx]
        print(f"{about}: {made.metadata.shared} bytes, {'missing ' + ', '.join(missing) if missing else 'all there'}")
        if missing or made.metadata.shared > SHARED_BYTES[capability]:
            failures.append(about)

    JITFunction.run = compile_only
    for head_dim, page_size in ((64, 64), (128, 64), (128, 128), (256, 64), (128, 16)):
        q = torch.zeros(40, 8, head_dim, dtype=dtype)
        cache = torch.zeros(5, 2, 2, page_size, head_dim, dtype=dtype)
        lens = torch.tensor([40], dtype=torch.int32)
        requests = PagedRequests(torch.tensor([0, 40], dtype=torch.int32), lens, lens, torch.ones(1, 4).int())
        tiles = prompt_tiles(head_dim, page_size, SHARED_BYTES[capability])[:most]
        for tile in tiles:
            for window in (0, 33) if tile == tiles[0] else (0,):
                about = f"head {head_dim}, page {page_size}, window {window}, {tile}"
                try:
                    launch_tma(q, cache, requests, 1.0, window, torch.empty_like(q), tile)
                except Exception as error:
                    failures.append(f"{about}: {type(error).__name__}: {error}")
    return failures


if __name__ == "__main__":
    most = int(sys.argv[3]) if len(sys.argv) > 3 else sys.maxsize
    found = compile_all(int(sys.argv[1]), getattr(torch, sys.argv[2]), most)
    print("\n".join(found) or "all compile")
    sys.exit(bool(found))
