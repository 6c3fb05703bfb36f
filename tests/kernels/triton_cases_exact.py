"""Cases of the products of ``--exact``: their results, not yet that they are the same in any batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from slipstream.kernels.linear.exact_linear import SQUARE_UNIT, exact_linear
from tests.kernels.triton_check import Case, Real

# Tokens, outputs, inputs: one of each, none divisible by anything, several parts, tiles of prompts, whole sums.
_SIZES = ((1, 1, 1), (3, 33, 100), (8, 96, 576), (17, 40, 64), (70, 130, 300), (4, 20, 2100))


def integers(squares: torch.Tensor) -> torch.Tensor:
    return (squares / SQUARE_UNIT).round().to(torch.int64)


def exact_products() -> Iterator[Case]:
    for num_tokens, out_size, in_size in _SIZES:
        for kind in ("plain", "norm", "gated", "add", "head"):
            name = f"exact_linear-{num_tokens}x{out_size}x{in_size}-{kind}"
            yield Case(name, exact_linear, lambda k=kind, s=(num_tokens, out_size, in_size): _args(k, *s))


def _args(kind: str, num_tokens: int, out_size: int, in_size: int) -> dict[str, Any]:
    x, num_rows = 2 * torch.randn(num_tokens, in_size), out_size * (2 if kind == "gated" else 1)
    is_normed = kind in ("norm", "gated")
    squares = integers(x.square().sum(1, keepdim=True) * torch.tensor([0.2, 0.5, 0.3]))
    return {
        "x": Real(x * torch.randn(in_size) if is_normed else x),
        "squares": squares if is_normed else None,
        "eps": 1e-5,
        "weight": Real(torch.randn(num_rows, in_size) / in_size**0.5),
        "bias": None if kind in ("head", "norm") else Real(torch.randn(num_rows)),
        "residual": Real(torch.randn(num_tokens, out_size)) if kind == "add" else None,
        "gain": None,
        "activation": "silu" if kind == "gated" else "",
        "wide": kind == "head",
    }
