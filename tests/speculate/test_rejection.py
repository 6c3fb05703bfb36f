from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels import triton_jit
from slipstream.sampling.draw import DrawKeys, draw_tokens
from slipstream.sampling.gumbel import TARGET_NOISE, gumbel_noise
from slipstream.speculate.rejection import ACCEPT_NOISE, DRAFT_NOISE, RESIDUAL_NOISE, judge_drafts
from tests.bundles import bundle
from tests.kernels.triton_check import Case, Real, check_kernel, poisoned_allocations, quietly_interpreted
from tests.operation_checks import checked_operations
from tests.speculate.triton_cases_rejection import CASES, judge_args, judged, reduced, same_args
from tests.speculate.unbiased import MAX_SIGMAS, VOCAB_SIZE, Drafter, drawn_with, looked_up, merged, try_many

needs_triton = pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")
BOTH = pytest.mark.parametrize("as_kernel", [False, pytest.param(True, marks=needs_triton)], ids=["torch", "triton"])


def judge(args: dict[str, Any], as_kernel: bool = False) -> tuple[Tensor, Tensor]:
    plain = {name: value.tensor if isinstance(value, Real) else value for name, value in args.items()}
    with quietly_interpreted() if as_kernel else nullcontext(), poisoned_allocations():
        return judge_drafts.body(**bundle(judge_drafts, plain))


@needs_triton
@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, torch.float32) for case in CASES), *((case, torch.float16) for case in CASES[::5])],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_kernel_is_its_definition(case: Case, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    check_kernel(case.op, case.args(), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_definition_is_the_method(case: Case, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    args = case.args()
    expected = [judged(args, i) for i in range(len(args["draft_ids"]))]
    logits = args.pop("logits").tensor.to(dtype)
    with checked_operations(compare_inputs=True):
        accepted, token_ids = judge_drafts(**bundle(judge_drafts, {**args, "logits": logits}))
    assert accepted.tolist() == [verdict.accepted for verdict in expected]
    assert token_ids.tolist() == [verdict.token_id for verdict in expected]


@BOTH
def test_without_a_draft_it_is_the_plain_draw(as_kernel: bool) -> None:
    torch.manual_seed(2)
    args = judge_args(5, 5000, 5000)
    args["logits"] = torch.randn(5, 5000)  # numbers with all their bits in use
    args["draft_ids"].fill_(-1)
    accepted, token_ids = judge(args, as_kernel)
    assert not accepted.any()
    keys = DrawKeys(args["temperature"], args["seeds"], args["positions"], args["choice"])
    with quietly_interpreted() if as_kernel else nullcontext():
        plain, _ = draw_tokens.body(args["logits"], args["logit_rows"], keys, noise=True, scaled=True)
    assert torch.equal(token_ids, plain)


@BOTH
@pytest.mark.parametrize("some", [False, True], ids=["first-tokens", "some-tokens"])
def test_a_drafter_that_broke_has_no_say(as_kernel: bool, some: bool) -> None:
    """Its drafts are rejected, and the tokens come from the target alone, from those that it does not know too."""
    torch.manual_seed(3)
    args = same_args(4, 100)
    args["draft_logits"] = args["draft_logits"][:, :, :80].clone()
    for row, broken in enumerate((torch.nan, torch.inf)):
        args["draft_logits"][row, 0, 40] = broken
    args["draft_logits"][2] = -torch.inf
    if some:
        args = reduced(args)
    accepted, token_ids = judge(args, as_kernel)
    assert accepted[:3].tolist() == [False] * 3
    noise = gumbel_noise(args["seeds"][:4], args["positions"], args["choice"][:4], 100, RESIDUAL_NOISE)
    assert token_ids[:3].tolist() == (args["logits"].tensor + noise)[:3].argmax(1).tolist()


@BOTH
@pytest.mark.parametrize("kind", ["deterministic", "drawn", "reduced"])
def test_tokens_stay_inside_the_vocabulary(as_kernel: bool, kind: str) -> None:
    """Whatever the draft is, and with nothing allowed at all."""
    torch.manual_seed(4)
    args = judge_args(6, 100, 0 if kind == "deterministic" else 100)
    if kind == "reduced":
        args = reduced({**args, "draft_logits": args["draft_logits"][..., :60], "draft_ids": args["draft_ids"] % 60})
    args["draft_idx"].zero_()
    args["draft_ids"] = torch.tensor([99, 100, 2**31 - 1, 0, 7, -1], dtype=torch.int32)
    args["logits"].tensor[3:] = -torch.inf
    for temperature in (0.0, 0.7):
        args["temperature"].fill_(temperature)
        accepted, token_ids = judge(args, as_kernel)
        assert not accepted[1:].any()
        assert ((token_ids >= 0) & (token_ids < 100)).all()


@BOTH
def test_a_drafter_that_is_the_target_is_always_right(as_kernel: bool) -> None:
    torch.manual_seed(5)
    n = 8 if as_kernel else 3000
    args = same_args(n, 512)
    rows = torch.arange(n, dtype=torch.int32)
    logits = args["draft_logits"][:n, 0]
    keys = DrawKeys(args["temperature"], args["seeds"], args["positions"], args["choice"])
    drawn, _ = draw_tokens(logits, rows, keys, True, False, purpose=DRAFT_NOISE)
    args["draft_ids"] = drawn.int()
    assert len(set(drawn.tolist())) > 4
    accepted, _ = judge(args, as_kernel)
    assert accepted.all()


@BOTH
def test_every_token_in_its_own_column_is_no_columns(as_kernel: bool) -> None:
    torch.manual_seed(7)
    for vocab_size in (1, 7, 512, 5000):
        args = judge_args(6, vocab_size, vocab_size)
        args["logits"] = torch.randn(6, vocab_size)
        with_columns = {**args, "draft_columns": torch.arange(vocab_size, dtype=torch.int32)}
        for plain, other in zip(judge(args, as_kernel), judge(with_columns, as_kernel), strict=True):
            assert torch.equal(plain, other)


@BOTH
def test_columns_may_be_in_any_order(as_kernel: bool) -> None:
    torch.manual_seed(8)
    args = reduced(judge_args(8, 512, 300))
    args["logits"] = torch.randn(8, 512)
    columns, order = args["draft_columns"], torch.randperm(300)
    turned = torch.where(columns < 0, columns, order.argsort().int()[columns.long()])
    other = judge({**args, "draft_logits": args["draft_logits"][..., order], "draft_columns": turned}, as_kernel)
    for a, b in zip(judge(args, as_kernel), other, strict=True):
        assert torch.equal(a, b)


def test_four_noises() -> None:
    assert len({TARGET_NOISE, DRAFT_NOISE, ACCEPT_NOISE, RESIDUAL_NOISE}) == 4


TRIALS = pytest.mark.parametrize(
    "trials", [60_000, pytest.param(1_000_000, marks=pytest.mark.slow)], ids=["few", "million"]
)


@TRIALS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("draft", [drawn_with(DRAFT_NOISE), looked_up], ids=["drawn", "deterministic"])
def test_what_comes_out_is_distributed_as_the_target(draft: Drafter, dtype: torch.dtype, trials: int) -> None:
    outcome = try_many("cpu", trials, dtype, draft)
    assert outcome.degrees > 150
    assert abs(outcome.sigmas) < MAX_SIGMAS
    assert abs(outcome.acceptance_sigmas) < MAX_SIGMAS


@TRIALS
@pytest.mark.parametrize("draft_vocab_size", [7, 300])
def test_a_drafter_of_few_tokens_changes_no_distribution(draft_vocab_size: int, trials: int) -> None:
    outcome = try_many("cpu", trials, torch.float32, drawn_with(DRAFT_NOISE), draft_vocab_size=draft_vocab_size)
    assert outcome.degrees > 150
    assert outcome.expected_acceptance > 0.5
    assert abs(outcome.sigmas) < MAX_SIGMAS
    assert abs(outcome.acceptance_sigmas) < MAX_SIGMAS


@pytest.mark.parametrize("draft_vocab_size", [VOCAB_SIZE, 100])
def test_noise_shared_by_drafts_and_residual_is_found(draft_vocab_size: int) -> None:
    """A fault that engines have shipped, planted: the same statistic, with as few trials, sees it."""
    shared = drawn_with(RESIDUAL_NOISE)
    outcome = try_many("cpu", 60_000, torch.float32, shared, draft_vocab_size=draft_vocab_size)
    assert outcome.sigmas > 2 * MAX_SIGMAS


def test_bins_are_merged_until_they_are_full() -> None:
    counts, expected = merged(torch.tensor([1.0, 2, 3, 4]).double(), torch.tensor([19.0, 500, 3, 7]).double())
    assert expected.tolist() == [29, 500]
    assert counts.tolist() == [8, 2]
