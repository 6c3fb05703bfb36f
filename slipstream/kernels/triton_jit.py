"""Triton where it can run: on a GPU, or interpreted on a CPU where a test asks for it.

Kernels are written against ``jit`` and ``tl`` from here, so that a machine without Triton can import every kernel file
and take the reference's path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

triton: Any = None
tl: Any = None
with suppress(ImportError):  # no GPU, or a platform without Triton
    triton, tl = import_module("triton"), import_module("triton.language")

_interpreted = False


def jit(function: Callable[..., None]) -> Any:
    """``triton.jit``, or nothing where there is no Triton."""
    return function if triton is None else triton.jit(function)


def runs_triton(tensor: Tensor) -> bool:
    """Whether an operation on this tensor takes its Triton kernel."""
    return tensor.is_cuda or _interpreted


@contextmanager
def interpreted() -> Iterator[None]:
    """Kernels run on CPU tensors inside. Needs ``TRITON_INTERPRET=1`` set before the kernels were imported."""
    global _interpreted
    before, _interpreted = _interpreted, True
    try:
        yield
    finally:
        _interpreted = before


def is_available() -> bool:
    return triton is not None


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


_counts: dict[tuple[torch.device, int], list[Tensor]] = {}


def arrival_counts(device: torch.device, num_counts: int) -> Tensor:
    """Zeros with which programs of one launch find out who is the last of them.

    The last to arrive clears its count, so they are zero again when the launch ends, and all kernels of one stream
    share them. Outgrown ones are kept: recorded launches go on using them.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    made = _counts.setdefault((device, stream), [])
    if not made or made[-1].shape[0] < num_counts:
        made.append(torch.zeros(max(num_counts, 1 << 14), dtype=torch.int32, device=device))
    return made[-1]
