"""Odd shapes, empty rows and poisoned memory for every Triton kernel; run interpreted and on a GPU alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from slipstream.device.operation import Operation
from slipstream.kernels.geglu import geglu
from slipstream.kernels.swiglu import swiglu
from tests.kernels.triton_check import Real


class Case(NamedTuple):
    name: str
    op: Operation[Any, Any]
    args: Callable[[], dict[str, Any]]  # drawn anew for every run
    scale: float = 1.0


def _gated() -> Iterator[Case]:
    for op in (swiglu, geglu):
        for num_tokens, size in ((1, 1), (3, 100), (2, 1500)):
            yield Case(
                f"{op.name}-{num_tokens}x{size}",
                op,
                lambda n=num_tokens, s=size: {"gate_up": Real(4 * torch.randn(n, 2 * s))},
            )


CASES = [*_gated()]
