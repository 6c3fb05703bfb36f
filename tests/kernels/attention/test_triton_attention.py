"""What the comparison with the definition, in ``test_triton_jit.py``, does not show."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels import triton_jit
from slipstream.kernels.attention.triton_attention import triton_attention
from tests.bundles import bundle
from tests.kernels.attention.dense_attention import dense_attention
from tests.kernels.triton_cases import CASES
from tests.kernels.triton_check import TOLERANCE, Real, poisoned_allocations, quietly_interpreted

pytestmark = pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")


def drawn(name: str) -> dict[str, Any]:
    torch.manual_seed(1)
    args = next(case for case in CASES if case.name == name).args()
    return {key: value.tensor if isinstance(value, Real) else value for key, value in args.items()}


def attend(args: dict[str, Any]) -> Tensor:
    with quietly_interpreted():
        return triton_attention.body(**bundle(triton_attention, args))


@pytest.mark.parametrize(
    "name", [case.name for case in CASES if case.op is triton_attention and case.name.endswith(("starts", "block"))]
)
def test_what_lies_before_the_first_slot_is_not_there(name: str) -> None:
    """Kernel and definition against a sum over the slots that a token sees: for the others hold NaN."""
    args = drawn(name)
    expected = dense_attention(**{key: value for key, value in args.items() if key != "query_len"})
    wide = {key: args[key].double() for key in ("q", "kv_cache")}
    torch.testing.assert_close(
        triton_attention.body(**bundle(triton_attention, args | wide)), expected, rtol=1e-10, atol=1e-10
    )
    with poisoned_allocations():
        actual = attend(args).double()
    tolerance = TOLERANCE[torch.float32]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "name",
    [
        *("attention-decode-long", "attention-decode-window", "attention-verify"),
        *("attention-decode-long-starts", "attention-decode-window-starts", "attention-verify-starts"),
    ],
)
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
            "seq_starts": None if args["seq_starts"] is None else args["seq_starts"][i : i + 1],
        }
        assert torch.equal(attend(alone), together[i * query_len : (i + 1) * query_len])


def test_counts_are_zero_after_a_launch() -> None:
    attend(drawn("attention-decode-long"))
    assert not triton_jit.arrival_counts(torch.device("cpu"), 1).any()


@pytest.mark.parametrize(
    ("capability", "dtype", "most"),
    [
        (90, "bfloat16", 6),  # variants of each kernel: a minute instead of five
        *(
            pytest.param(capability, dtype, 1000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])
            for capability in (80, 89, 90, 100, 120)
            for dtype in ("bfloat16", "float32")
        ),
    ],
)
def test_every_kernel_compiles(capability: int, dtype: str, most: int) -> None:
    """For Hopper, and for what came before and after it. In a process of its own: here kernels are interpreted."""
    command = [sys.executable, "-m", "tests.kernels.compile_cases", str(capability), dtype, str(most)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
