"""Cases of what a pass of a draft head takes and leaves, for ``triton_cases``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from slipstream.kernels.linear.fused_linear import linear_few
from slipstream.kernels.step.draft_states import join_states, keep_states
from tests.kernels.triton_check import Case, Real

# Tokens, size of a state, vocabulary: one of each, none divisible by anything, a model's own, none at all.
_JOINED = ((1, 1, 1), (3, 100, 7), (5, 576, 40), (2, 4096, 9), (0, 64, 5))
# Tokens, tokens that count, modules, size; kept among how many.
_KEPT = ((1, 1, 1, 1, 1), (9, 3, 1, 100, 5), (4, 4, 3, 33, 7), (6, 2, 2, 4096, 2), (5, 0, 1, 64, 3))
# As the products of layers: see ``triton_cases_fused``.
_PRODUCTS = ((1, 1, 1), (3, 33, 100), (4, 70, 1500), (8, 48, 5000), (17, 40, 64), (33, 70, 130))


def head_passes() -> Iterator[Case]:
    for shape in _JOINED:
        for name in ("plain", "normed", "masked", "strided", "in-order"):
            label = "x".join(map(str, shape))
            yield Case(f"join_states-{label}-{name}", join_states, lambda s=shape, n=name: _join_args(*s, n))
    for sizes in _KEPT:
        yield Case(f"keep_states-{'x'.join(map(str, sizes))}", keep_states, lambda s=sizes: _keep_args(*s))
    for num_tokens, out_size, in_size in _PRODUCTS:
        for bias in (False, True):

            def args(n: int = num_tokens, out: int = out_size, size: int = in_size, b: bool = bias) -> dict[str, Any]:
                weight = Real(torch.randn(out, size) / size**0.5)
                return {
                    "x": Real(torch.randn(n, size)),
                    "weight": weight,
                    "bias": Real(torch.randn(out)) if b else None,
                }

            yield Case(f"linear_few-{num_tokens}x{out_size}x{in_size}-{bias}", linear_few, args)


def _join_args(n: int, size: int, vocab_size: int, name: str) -> dict[str, Any]:
    hidden = 3 * torch.randn(n, 2 * size)[:, :size] if name == "strided" else 3 * torch.randn(n, size)
    normed, in_order = name != "plain", name == "in-order"
    positions = torch.arange(n) % 3 if name == "masked" else None
    return {
        "hidden": Real(hidden),
        "embedding": Real(torch.randn(n if in_order else vocab_size, size)),
        "token_ids": None if in_order else torch.randint(0, vocab_size, (n,), dtype=torch.int32),
        "embedding_gain": Real(torch.randn(size)) if normed else None,
        "hidden_gain": Real(torch.randn(size)) if normed else None,
        "eps": 1e-5,
        "positions": positions,
    }


def _keep_args(num_tokens: int, n: int, num_modules: int, size: int, max_kept: int) -> dict[str, Any]:
    states = torch.randn(num_tokens, num_modules * size)
    # Memory after the batch is unchanged.
    kept = torch.randn(num_modules, max(n, max_kept), size)[:, :n]
    return {"states": Real(states), "indices": torch.randint(0, num_tokens, (n,)), "kept": Real(kept)}
