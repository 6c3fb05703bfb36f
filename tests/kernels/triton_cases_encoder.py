"""Cases of encoders, for ``triton_cases``: attention over ragged texts, norms, types of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from slipstream.kernels.attention.encoder_attention import encoder_attention
from slipstream.kernels.elementwise.layer_norm import layer_norm
from slipstream.kernels.step.token_types import token_types
from tests.kernels.triton_check import Case, Real, poisoned


class _Texts(NamedTuple):
    lens: tuple[int, ...]
    heads: int = 2
    head_dim: int = 16
    span: int = 0  # of the bias; 0: none
    num_padding: int = 0  # requests
    spare_tokens: int = 0
    at_rest: tuple[int, ...] = ()  # rows that do not run, though their tokens were planned


TEXTS = {
    "one": _Texts((7,)),
    "ragged": _Texts((1, 130, 64, 3, 65), heads=3, num_padding=2, spare_tokens=5),
    "bias": _Texts((70, 1, 20), span=80, at_rest=(1,)),
    "odd": _Texts((33, 5), heads=1, head_dim=12, span=40, num_padding=1),
    "wide": _Texts((40, 9), head_dim=80),
}


def draw(texts: _Texts) -> dict[str, Any]:
    lens = torch.tensor([*texts.lens, *[0] * texts.num_padding], dtype=torch.int32)
    starts = torch.tensor([0, *lens.tolist()]).cumsum(0).int()
    alive = lens.clone()
    alive[list(texts.at_rest)] = 0
    num_tokens = int(starts[-1]) + texts.spare_tokens
    # Parts of one product, so that strides are tested too; what belongs to no text holds anything.
    qkv = torch.randn(num_tokens, 3 * texts.heads, texts.head_dim)
    qkv[int(starts[-1]) :] = torch.nan
    for idx in texts.at_rest:
        qkv[int(starts[idx]) : int(starts[idx + 1])] = torch.nan
    q, k, v = qkv.split(texts.heads, dim=1)
    bias = torch.randn(texts.heads, 2 * texts.span - 1) if texts.span else None
    return {
        "q": Real(q),
        "k": Real(k),
        "v": Real(v),
        "query_start_loc": starts,
        "query_lens": alive,
        "scale": texts.head_dim**-0.5,
        "bias": bias,
    }


def encoders() -> Iterator[Case]:
    for name, texts in TEXTS.items():
        yield Case(f"encoder-{name}", encoder_attention, lambda texts=texts: draw(texts))
    for size, has_residual, has_bias in ((1, True, True), (48, False, True), (300, True, False), (1024, True, True)):

        def norm_args(size: int = size, residual: bool = has_residual, bias: bool = has_bias) -> dict[str, Any]:
            return {
                "x": Real(3 + torch.randn(5, size)),
                "residual": Real(torch.randn(5, size)) if residual else None,
                "weight": Real(torch.randn(size)),
                "bias": Real(torch.randn(size)) if bias else None,
                "eps": 1e-5,
            }

        yield Case(f"layer_norm-{size}", layer_norm, norm_args, scale=4.0)

    def type_args() -> dict[str, Any]:
        planned, alive = (5, 1, 300, 4, 2), (5, 1, 300, 0, 2)
        starts = torch.tensor([0, *planned]).cumsum(0).int()
        rows = torch.tensor([3, 0, 5, 1, 2], dtype=torch.int32)
        return {
            "positions": torch.cat([torch.arange(count) for count in (*planned, 7)]),
            "batch_rows": rows,
            "query_start_loc": starts,
            "query_lens": torch.tensor(alive, dtype=torch.int32),
            "second_from": torch.tensor([0, 2, 1, 3, 9, 200], dtype=torch.int32),
            "out": poisoned(int(starts[-1]) + 7),
        }

    yield Case("token_types", token_types, type_args)
