from __future__ import annotations

import pytest
import torch

from slipstream.kernels import decode_attention as module
from slipstream.kernels import triton_jit
from tests.kernels.triton_cases_fused import decodes
from tests.kernels.triton_check import check_kernel

CASES = {case.name.removeprefix("decode_attention-"): case for case in decodes()}


@pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")
@pytest.mark.parametrize(
    ("name", "programs"),
    [
        *((name, n) for name in ("first-and-later", "verify", "window", "many") for n in (1, 4)),
        ("window", 512),
        ("one", 512),
    ],
)
def test_any_number_of_programs_a_request(monkeypatch: pytest.MonkeyPatch, name: str, programs: int) -> None:
    """Large batches have one program for all keys of a head, small ones many. All must come to the same."""
    monkeypatch.setattr(module, "_WANTED_PROGRAMS", programs)
    torch.manual_seed(0)
    check_kernel(CASES[name].op, CASES[name].args())


def test_equal_queries_only() -> None:
    args = {name: getattr(value, "tensor", value) for name, value in CASES["verify"].args().items()}
    with triton_jit.interpreted(), pytest.raises(AssertionError, match="pads requests and tokens together"):
        module.decode_attention.body(**{**args, "query_len": 3})
