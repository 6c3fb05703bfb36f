"""Speculative sampling through the whole engine: tokens of requests are draws from the target's distribution."""

from __future__ import annotations

import pytest
import torch

from slipstream.speculate.rejection import DRAFT_NOISE, RESIDUAL_NOISE
from tests.speculate.coin_model import expected_acceptance, likely_ids, make_core, sigmas_off

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@DTYPES
@pytest.mark.parametrize(
    "num_tokens", [50_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_tokens_are_draws_from_the_target(dtype: torch.dtype, num_tokens: int) -> None:
    core = make_core("cpu", dtype, num_rows=64)
    assert abs(sigmas_off(core, dtype, num_tokens, num_rows=64)) < 6
    stats = core.stats
    assert 0.3 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.8


@pytest.mark.parametrize(
    ("dtype", "num_tokens"),
    [
        (torch.float32, 30_000),
        pytest.param(torch.float32, 1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
        pytest.param(torch.bfloat16, 1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
def test_a_head_that_knows_some_of_the_tokens(dtype: torch.dtype, num_tokens: int) -> None:
    draft_ids = likely_ids(dtype, 200)
    core = make_core("cpu", dtype, num_rows=64, draft_ids=draft_ids)
    assert abs(sigmas_off(core, dtype, num_tokens, num_rows=64)) < 6
    stats = core.stats
    assert abs(stats.num_accepted_tokens / stats.num_draft_tokens - expected_acceptance(dtype, draft_ids)) < 0.015


def test_a_head_whose_columns_are_taken_for_tokens_is_found() -> None:
    core = make_core("cpu", torch.float32, num_rows=64, draft_ids=likely_ids(torch.float32, 200))
    columns = core.runner.speculator.draft_columns
    assert columns is not None
    columns.fill_(-1)
    columns[:200] = torch.arange(200)
    assert sigmas_off(core, torch.float32, 30_000, num_rows=64) > 12


def test_drafts_and_residual_of_one_noise_are_found() -> None:
    core = make_core("cpu", torch.float32, num_rows=64, purpose=RESIDUAL_NOISE)
    assert sigmas_off(core, torch.float32, 50_000, num_rows=64) > 12
    assert DRAFT_NOISE != RESIDUAL_NOISE
