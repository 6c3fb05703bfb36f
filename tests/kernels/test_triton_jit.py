"""Every Triton kernel, interpreted on a CPU."""

from __future__ import annotations

import pytest
import torch

from slipstream.kernels import triton_jit
from tests.kernels.triton_cases import CASES, Case
from tests.kernels.triton_check import check_kernel

pytestmark = pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel_is_its_definition(case: Case, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    check_kernel(case.op, case.args(), dtype, scale=case.scale)


def test_powers() -> None:
    assert [triton_jit.next_power_of_2(n) for n in (1, 2, 3, 576, 1024)] == [1, 2, 4, 1024, 1024]
