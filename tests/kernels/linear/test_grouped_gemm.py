"""Pairs grouped by expert; the products themselves are held to their definition in ``test_triton_jit``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.kernels import triton_jit
from slipstream.kernels.linear.grouped_gemm import FEW, MANY, group_pairs, max_blocks, tiles_for
from slipstream.kernels.linear.moe import expert_mlp
from tests.kernels.triton_cases_moe import anywhere, layer, the_same
from tests.kernels.triton_check import poisoned_allocations, prepared, quietly_interpreted

needs_triton = pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")


@needs_triton
@pytest.mark.parametrize(
    ("num_tokens", "num_chosen", "num_experts"), [(0, 2, 3), (1, 1, 1), (1, 3, 70), (65, 2, 5), (700, 3, 4)]
)
def test_pairs_are_grouped_as_by_a_stable_sort(num_tokens: int, num_chosen: int, num_experts: int) -> None:
    expert_ids = anywhere(num_tokens, num_chosen, num_experts)
    with quietly_interpreted(), poisoned_allocations():
        order, starts = group_pairs(expert_ids, num_experts)
    sorted_ids, expected = expert_ids.flatten().sort(stable=True)
    assert order.tolist() == expected.tolist()
    assert starts.tolist() == torch.searchsorted(sorted_ids, torch.arange(num_experts + 1)).tolist()


@needs_triton
def test_experts_without_tokens_are_empty_groups() -> None:
    with quietly_interpreted():
        order, starts = group_pairs(torch.tensor([[3], [1], [3]]), 5)
    assert order.tolist() == [1, 0, 2]
    assert starts.tolist() == [0, 0, 1, 1, 3, 3]


@pytest.mark.parametrize("rows", [1, 4])
def test_no_routing_makes_more_blocks(rows: int) -> None:
    """Every split of up to 13 pairs over up to 3 experts; the limit is reached by some."""
    for num_pairs in range(14):
        for num_experts in (1, 2, 3):
            splits = [
                (a, b, num_pairs - a - b)
                for a in range(num_pairs + 1)
                for b in range(num_pairs + 1 - a)
                if (num_experts > 1 or b == num_pairs - a == 0) and (num_experts > 2 or a + b == num_pairs)
            ]
            most = max((sum(-(-n // rows) for n in split) for split in splits), default=0)
            assert most <= max_blocks(num_pairs, num_experts, rows) <= most + 1


def _run(args: dict[str, Any]) -> Tensor:
    with quietly_interpreted(), poisoned_allocations():
        return expert_mlp(*args.values())


def _rows(args: dict[str, Any], rows: slice | list[int]) -> dict[str, Any]:
    return args | {name: args[name][rows] for name in ("x", "weights", "expert_ids")}


@pytest.fixture
def products_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies with numpy's BLAS, which on some CPUs sums a row in another order at another row of
    the tile. A GPU does not; here each row is summed by itself."""
    from triton.runtime import interpreter

    def create_dot(_self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        left, right = a.data.astype(d.data.dtype), b.data.astype(d.data.dtype)
        rows = np.stack([(row[:, None] * right).sum(axis=0) for row in left])
        return interpreter.TensorHandle(rows + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@needs_triton
@pytest.mark.usefixtures("products_in_one_order")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_a_token_alone_is_bit_for_bit_the_same(dtype: torch.dtype) -> None:
    args, _ = prepared(layer(anywhere, 20, 2, 4, 96, 40), dtype, "cpu")
    assert tiles_for(40, 4) == tiles_for(2, 4) == FEW
    together = _run(args)
    for token in (0, 7, 19):
        row = slice(token, token + 1)
        assert torch.equal(_run(_rows(args, row)), together[row])
    order = torch.randperm(20).tolist()
    assert torch.equal(_run(_rows(args, order)), together[order])


@needs_triton
def test_tokens_without_meaning_stay_among_themselves() -> None:
    args, _ = prepared(layer(the_same, 70, 1, 3, 40, 24), torch.float16, "cpu")
    assert tiles_for(70, 3) == MANY
    clean = _run(args)
    args["x"][[3, 64]], args["weights"][5] = float("nan"), float("inf")
    dirty = _run(args)
    kept = [i for i in range(70) if i not in (3, 5, 64)]
    assert torch.equal(dirty[kept], clean[kept])
    assert bool(dirty[[3, 64]].isnan().all())
