"""Every Triton kernel on the GPU, in the type it is made for."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_cases import CASES
from tests.kernels.triton_check import Case, check_kernel
from tests.sampling.triton_cases import CASES as SAMPLING_CASES
from tests.speculate.triton_cases import CASES as SPECULATE_CASES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("case", [*CASES, *SAMPLING_CASES, *SPECULATE_CASES], ids=lambda case: case.name)
def test_kernel_is_its_definition(case: Case, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    check_kernel(case.op, case.args(), dtype, "cuda", case.scale)
