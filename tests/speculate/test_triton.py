"""The small Triton kernels around drafts, interpreted on a CPU. Search and rejection have files of their own."""

from __future__ import annotations

import pytest
import torch

from slipstream.kernels import triton_jit
from tests.kernels.triton_check import Case, check_kernel
from tests.speculate.triton_cases import SMALL_CASES

pytestmark = pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")


@pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.name)
def test_kernel_is_its_definition(case: Case) -> None:
    torch.manual_seed(0)
    check_kernel(case.op, case.args(), torch.float32, scale=case.scale)
