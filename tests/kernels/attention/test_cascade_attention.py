"""What the comparison with the definition, in ``test_triton_jit.py``, does not show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels import triton_jit
from slipstream.kernels.attention.cascade_attention import cascade_attention
from tests.bundles import bundle
from tests.kernels.attention.dense_attention import dense_attention
from tests.kernels.triton_cases_cascade import SHAPES, draw
from tests.kernels.triton_check import TOLERANCE, Real, poisoned_allocations, quietly_interpreted

pytestmark = pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")


def drawn(name: str) -> dict[str, Any]:
    torch.manual_seed(1)
    return {key: value.tensor if isinstance(value, Real) else value for key, value in draw(SHAPES[name]).items()}


def attend(args: dict[str, Any]) -> Tensor:
    with quietly_interpreted(), poisoned_allocations():
        return cascade_attention.body(**bundle(cascade_attention, args))


def dense(args: dict[str, Any]) -> Tensor:
    return dense_attention(**{k: v for k, v in args.items() if k not in ("query_len", "num_common")}, window=0)


def close(actual: Tensor, expected: Tensor) -> bool:
    tolerance = TOLERANCE[torch.float32]
    return torch.allclose(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["mixed-odd-head", "decode-first-not-running"])
def test_the_definition_and_the_kernel_are_a_sum_over_the_slots_that_a_token_sees(name: str) -> None:
    args = drawn(name)
    expected = dense(args)
    wide = {key: args[key].double() for key in ("q", "kv_cache")}
    torch.testing.assert_close(
        cascade_attention.body(**bundle(cascade_attention, args | wide)), expected, rtol=1e-10, atol=1e-10
    )
    assert close(attend(args), expected)


def test_fewer_pages_than_there_are_give_the_same_and_more_do_not() -> None:
    args, page_size = drawn("mixed-wide-head"), SHAPES["mixed-wide-head"].page_size
    expected = dense(args)
    assert close(attend(args | {"num_common": page_size}), expected)
    assert not close(attend(args | {"num_common": args["num_common"] + page_size}), expected)


def test_the_common_pages_are_read_from_the_first_table_alone() -> None:
    """So a number that is too high shows, and what others have there need not be looked up."""
    args = drawn("decode-widest-head")
    expected = attend(args)
    args["block_table"][1:, : SHAPES["decode-widest-head"].num_common] = 0
    assert torch.equal(attend(args), expected)


def test_what_is_no_number_stays_with_its_token() -> None:
    args = drawn("mixed-chunks")
    args["q"] = args["q"].nan_to_num()
    expected = dense(args)
    args["q"][3, 1] = float("nan")
    out = attend(args)
    assert out[3, 1].isnan().all()
    out[3, 1] = expected[3, 1].float()
    assert close(out, expected)


def test_a_part_of_a_page_is_refused() -> None:
    with pytest.raises(AssertionError, match="whole pages"):
        attend(drawn("mixed") | {"num_common": 5})
