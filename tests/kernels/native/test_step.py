"""A step's bookkeeping in C: the same as the definitions, to the bit, over the cases of the Triton kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream.kernels import native
from slipstream.plan import RowStatus
from tests.bundles import bundle, written
from tests.kernels.triton_cases import CASES
from tests.kernels.triton_check import Case, poisoned_allocations, prepared
from tests.speculate.triton_cases import SMALL_CASES

pytestmark = pytest.mark.skipif(native.library() is None, reason="there is no C compiler here")

IN_C = [case for case in (*CASES, *SMALL_CASES) if case.op.on_cpu is not None]


def tensors(found: Any) -> list[torch.Tensor]:
    return [] if found is None else list(found) if isinstance(found, tuple) else [found]


@pytest.mark.parametrize("case", IN_C, ids=lambda case: case.name)
def test_c_is_the_definition(case: Case) -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        args = case.args()
        own, expected = (bundle(case.op, prepared(args, torch.float32, "cpu")[0]) for _ in range(2))
        with poisoned_allocations():
            found, wanted = case.op(**own), case.op.body(**expected)
        for actual, right in zip(tensors(found), tensors(wanted), strict=True):
            torch.testing.assert_close(actual, right, rtol=0, atol=0, equal_nan=True)
        for name, right in written(case.op, expected).items():
            assert torch.equal(written(case.op, own)[name], right), (name, seed)


def test_every_operation_in_c_has_cases() -> None:
    assert len({case.op.name for case in IN_C}) == 11


def test_names_of_states_are_those_of_the_plan() -> None:
    assert [status.name for status in RowStatus][:4] == ["RUNNING", "STOPPED", "LENGTH", "ERROR"]
    assert [int(status) for status in RowStatus][:4] == [0, 1, 2, 3]
