"""Triton's interpreter with arithmetic that shows in which order a kernel adds.

The interpreter leaves products to numpy, whose sums depend on shapes, as no tensor core's do: here a product is added
along k, one number after another, to the accumulator. On a GPU a reduction of floats adds in an order that
depends on the tile's layout: here it is an error where more than one number is added, so that no kernel that promises
exact results has one. Integers are added in any order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError as InterpreterError

from tests.kernels.triton_check import poisoned_allocations, quietly_interpreted


def _add_along_k(_builder: Any, a: Any, b: Any, d: Any, _precision: Any, _imprecise: Any) -> Any:
    kind = d.data.dtype
    left, right, total = a.data.astype(kind), b.data.astype(kind), d.data
    for k in range(left.shape[-1]):
        total = total + left[..., :, k : k + 1] * right[..., k : k + 1, :]
    return interpreter.TensorHandle(total, d.dtype.scalar)


def _sum_integers(self: Any, value: Any) -> Any:
    data = value.handle.data
    if np.issubdtype(data.dtype, np.floating) and data.shape[self.axis or 0] > 1:
        raise AssertionError("a sum of floats depends on the layout of its tile")
    return self.to_tensor(np.sum(data, axis=self.axis, keepdims=self.keep_dims), value.dtype)


@contextmanager
def order_revealed() -> Iterator[None]:
    with products_along_k(), pytest.MonkeyPatch.context() as patch, poisoned_allocations():
        patch.setattr(interpreter.ReduceOps, "sum", _sum_integers)
        yield


@contextmanager
def products_along_k() -> Iterator[None]:
    """The first half, for whole engines, whose norms have a program for each row and may add it up as they like."""
    with pytest.MonkeyPatch.context() as patch, quietly_interpreted():
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", _add_along_k)
        yield
