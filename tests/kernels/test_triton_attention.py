"""What the comparison with the definition, in ``test_triton_jit.py``, does not show."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels import triton_jit
from slipstream.kernels.triton_attention import triton_attention
from tests.kernels.triton_cases import CASES
from tests.kernels.triton_check import Real, quietly_interpreted

pytestmark = pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")


def drawn(name: str) -> dict[str, Any]:
    torch.manual_seed(1)
    args = next(case for case in CASES if case.name == name).args()
    return {key: value.tensor if isinstance(value, Real) else value for key, value in args.items()}


def attend(args: dict[str, Any]) -> Tensor:
    with quietly_interpreted():
        return triton_attention.body(**args)


@pytest.mark.parametrize("name", ["attention-decode-long", "attention-decode-window", "attention-verify"])
def test_a_request_does_not_depend_on_its_batch(name: str) -> None:
    """Bit for bit: which program sums what is a matter of the keys' positions alone."""
    args = drawn(name)
    together = attend(args)
    query_len = args["query_len"]
    for i in range(len(args["seq_lens"])):
        alone = {
            **args,
            "q": args["q"][i * query_len : (i + 1) * query_len],
            "query_start_loc": torch.tensor([0, query_len], dtype=torch.int32),
            "query_lens": args["query_lens"][i : i + 1],
            "seq_lens": args["seq_lens"][i : i + 1],
            "block_table": args["block_table"][i : i + 1],
        }
        assert torch.equal(attend(alone), together[i * query_len : (i + 1) * query_len])


def test_counts_are_zero_after_a_launch() -> None:
    attend(drawn("attention-decode-long"))
    assert not triton_jit.arrival_counts(torch.device("cpu"), 1).any()


@pytest.mark.parametrize(
    "capability",
    [90, *(pytest.param(other, marks=pytest.mark.slow) for other in (80, 89, 100, 120))],
)
def test_every_kernel_compiles(capability: int) -> None:
    """For Hopper, and for what came before and after it. In a process of its own: here kernels are interpreted."""
    command = [sys.executable, "-m", "tests.kernels.compile_cases", str(capability)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
