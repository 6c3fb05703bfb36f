"""A Triton kernel against the definition of its operation: the same rounded inputs, in float64 by plain torch.

The same check serves the interpreter on a CPU (float32, float16) and a GPU (bfloat16 too). Memory that a kernel is to
fill is poisoned before, so that what it leaves out shows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.device.operation import Operation
from slipstream.kernels.triton_jit import interpreted
from tests.bundles import bundle, written

# One table for all kernels: sums in float32, one rounding of the result.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
POISON = 0x7FF1  # as 16-bit units: not a number in any float type, and far outside any index


@dataclass(frozen=True)
class Real:
    """An argument in the model's type; other tensors keep theirs."""

    tensor: Tensor


class Case(NamedTuple):
    name: str
    op: Operation[Any, Any]
    args: Callable[[], dict[str, Any]]  # drawn anew for every run
    scale: float = 1.0


def prepared(args: dict[str, Any], dtype: torch.dtype, device: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments for the kernel, and the same numbers in float64 for the definition."""
    own, wide = {}, {}
    for name, value in args.items():
        if isinstance(value, Real):
            rounded = value.tensor.to(dtype)
            own[name], wide[name] = rounded.to(device), rounded.double()
        elif isinstance(value, Tensor):
            # A view stays one, so that strides are tested too.
            own[name] = value.to(device) if device != "cpu" else value.clone(memory_format=torch.preserve_format)
            wide[name] = value.clone()
        elif isinstance(value, tuple) and hasattr(value, "_fields"):  # a bundle where an operation has two of a kind
            parts = prepared(value._asdict(), dtype, device)  # type: ignore[attr-defined]
            own[name], wide[name] = (type(value)(**part) for part in parts)
        else:
            own[name] = wide[name] = value
    return own, wide


@contextmanager
def quietly_interpreted() -> Iterator[None]:
    """The interpreter computes with numpy, which warns of overflows, and of habits of the interpreter's own."""
    with interpreted(), np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills fresh memory with NaN and the largest integers
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _compare(name: str, actual: Any, expected: Any, dtype: torch.dtype, scale: float, equal_nan: bool = False) -> None:
    if expected is None:
        assert actual is None, name
    elif isinstance(expected, tuple):
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            _compare(f"{name}[{i}]", a, e, dtype, scale)
    elif expected.is_floating_point():
        tolerance = TOLERANCE[dtype] * scale
        torch.testing.assert_close(
            *(actual.cpu().double(), expected.double()),
            rtol=tolerance,
            atol=tolerance,
            equal_nan=equal_nan,
            msg=lambda m: f"{name}: {m}",
        )
    else:
        assert torch.equal(actual.cpu(), expected), name


def check_kernel(
    op: Operation[Any, Any],
    args: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    scale: float = 1.0,  # of the tolerance, for results that are sums of large numbers
) -> Any:
    """Run both, compare results and everything written, and give the kernel's result for further questions."""
    own, wide = prepared(args, dtype, device)
    own, wide = bundle(op, own), bundle(op, wide)
    expected = op.body(**wide)
    with quietly_interpreted() if device == "cpu" else nullcontext(), poisoned_allocations():
        actual = op.body(**own)
    _compare(op.name, actual, expected, dtype, scale)
    wanted = written(op, wide)
    for name, tensor in written(op, own).items():
        # Where it wrote nothing is what was there before, a planted NaN too.
        _compare(f"{op.name} writes {name}", tensor, wanted[name], dtype, scale, equal_nan=True)
    return actual


def poisoned(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    made = torch.empty(shape, dtype=dtype)
    made.view(torch.int16).fill_(POISON)
    return made
