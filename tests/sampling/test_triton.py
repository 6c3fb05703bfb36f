"""The Triton kernels of sampling, interpreted on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.kernels import triton_jit
from slipstream.kernels.triton_jit import jit, tl
from slipstream.sampling import draw
from slipstream.sampling.draw import draw_tokens
from slipstream.sampling.gumbel import TARGET_NOISE, gumbel_block, gumbel_noise
from slipstream.sampling.temperature import apply_temperature
from slipstream.sampling.top_p import apply_top_p
from tests.bundles import bundle
from tests.kernels.test_triton_jit import early_faults
from tests.kernels.triton_check import Case, Real, check_kernel, poisoned_allocations, quietly_interpreted
from tests.sampling.triton_cases import CASES, draw_args, safe_p

pytestmark = pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel_is_its_definition(case: Case, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    check_kernel(case.op, case.args(), dtype, scale=case.scale)


def test_draws_that_start_early_wait_first() -> None:
    assert early_faults(Path(draw.__file__).read_text()) == []


def drawn(args: dict[str, Any]) -> list[int]:
    plain = {name: value.tensor if isinstance(value, Real) else value for name, value in args.items()}
    with quietly_interpreted(), poisoned_allocations():
        token_ids, _ = draw_tokens.body(**bundle(draw_tokens, plain))
    return token_ids.tolist()


@jit
def _noise_kernel(seeds, position, choice, out, first_token, PURPOSE: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    noise = gumbel_block(seeds, tl.load(position), tl.load(choice), first_token, PURPOSE, BLOCK)
    tl.store(out + tl.arange(0, BLOCK), noise)


@pytest.mark.parametrize("purpose", [TARGET_NOISE, 1])
def test_noise_inside_a_kernel_is_the_noise(purpose: int) -> None:
    torch.manual_seed(0)
    block = 4096
    for first_token in (0, 3 * block):
        seeds = torch.randint(-(2**31), 2**31, (1, 2)).int()
        position, choice = torch.tensor([2**31 - 5], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
        out = torch.empty(block)
        with quietly_interpreted():
            _noise_kernel[(1,)](seeds, position, choice, out, first_token, PURPOSE=purpose, BLOCK=block)
        expected = gumbel_noise(seeds, position, choice, first_token + block, purpose)[0, first_token:]
        assert expected.max() > 6.5  # the tail, where precision is lost first
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


def test_what_is_drawn_from_equal_logits_is_the_largest_noise() -> None:
    torch.manual_seed(1)
    args = draw_args(torch.zeros(5, 5003), noise=True)
    args["temperature"].fill_(1.0)
    owners = args["batch_rows"].long()
    noise = gumbel_noise(args["seeds"][owners], args["positions"], args["choice"][owners], 5003)
    assert drawn(args) == noise.argmax(1).tolist()


def test_a_row_does_not_feel_its_neighbours() -> None:
    torch.manual_seed(2)
    logits = torch.randn(6, 5003)
    args = draw_args(logits, noise=True)
    together = drawn(args)
    order = torch.randperm(6)
    turned = {**args, "logits": logits[order], "batch_rows": args["batch_rows"][order]}
    turned["positions"] = args["positions"][order]
    assert drawn(turned) == [together[i] for i in order.tolist()]
    for i in range(6):
        own = {name: args[name][i : i + 1] for name in ("batch_rows", "positions")}
        alone = {**args, "logits": logits[i : i + 1], **own}
        assert drawn(alone) == together[i : i + 1]


def test_scaled_before_or_inside_is_the_same() -> None:
    torch.manual_seed(3)
    logits = torch.randn(6, 1000)
    args = draw_args(logits, noise=True)
    args["temperature"][:3] = torch.tensor([1e-38, 1e-44, 0.3])  # divided by the first two most logits would overflow
    before = apply_temperature(logits, args["temperature"][args["batch_rows"].long()])
    assert torch.isfinite(before).all()
    assert drawn(args) == drawn({**args, "logits": before, "scaled": True})


@pytest.mark.parametrize(("n", "size", "copies"), [(2, 5003, 1), (12, 200, 5)])
def test_top_p_of_uneven_numbers(n: int, size: int, copies: int) -> None:
    """Numbers with all their bits in use, alone and with equals far away."""
    torch.manual_seed(4)
    logits = (torch.randn(n, size) * 3).repeat(1, copies)
    top_p = torch.tensor([safe_p(row, p) for row, p in zip(logits, torch.rand(n).tolist(), strict=True)])
    check_kernel(apply_top_p, {"logits": Real(logits), "top_p": top_p})
