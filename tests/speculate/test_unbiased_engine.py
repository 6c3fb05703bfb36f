"""Speculative sampling through the whole engine: tokens of requests are draws from the target's distribution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.speculate import verify
from slipstream.speculate.rejection import DRAFT_NOISE, RESIDUAL_NOISE, DraftTokens, judge_drafts
from tests.speculate.coin_model import NUM_DRAFTS, expected_acceptance, likely_ids, make_core, sigmas_off

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
    columns = core.runner.speculator.drawn_from.draft_columns
    assert columns is not None
    columns.fill_(-1)
    columns[:200] = torch.arange(200)
    assert sigmas_off(core, torch.float32, 30_000, num_rows=64) > 12


def test_drafts_and_residual_of_one_noise_are_found() -> None:
    core = make_core("cpu", torch.float32, num_rows=64, purpose=RESIDUAL_NOISE)
    assert sigmas_off(core, torch.float32, 50_000, num_rows=64) > 12
    assert DRAFT_NOISE != RESIDUAL_NOISE


NUM_STATES = 5


def sigmas_by_state(draft_vocab_size: int | None, num_tokens: int, num_greedy: int = 0) -> float:
    """Where a token's distribution depends on the one before it, so no two positions of a row's drafts are alike."""
    ids = None if draft_vocab_size is None else likely_ids(torch.float32, draft_vocab_size, NUM_STATES)
    core = make_core("cpu", torch.float32, num_rows=64, draft_ids=ids, num_states=NUM_STATES)
    return sigmas_off(core, torch.float32, num_tokens, 64, NUM_STATES, num_greedy)


@pytest.mark.parametrize("draft_vocab_size", [None, 200], ids=["a draft model", "a head"])
@pytest.mark.parametrize(
    "num_tokens", [12_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_tokens_that_depend_on_the_last_are_draws_from_the_target(
    draft_vocab_size: int | None, num_tokens: int
) -> None:
    assert abs(sigmas_by_state(draft_vocab_size, num_tokens)) < 6


def test_greedy_requests_beside_them_change_nothing() -> None:
    """Those that come first in the batch: neither drafts nor tokens are drawn as they are."""
    assert abs(sigmas_by_state(None, 12_000, num_greedy=2)) < 6


@pytest.mark.parametrize("places_off", [-1, 1])
@pytest.mark.parametrize("draft_vocab_size", [None, 200], ids=["a draft model", "a head"])
def test_drafts_that_are_judged_by_their_neighbours_logits_are_found(
    draft_vocab_size: int | None, places_off: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def misplaced(logits: Tensor, drafts: DraftTokens, *rest: Any) -> Any:
        other_idx = (drafts.draft_idx + places_off).clamp(0, NUM_DRAFTS - 1)
        return judge_drafts(logits, drafts._replace(draft_idx=other_idx), *rest)

    monkeypatch.setattr(verify, "judge_drafts", misplaced)
    assert sigmas_by_state(draft_vocab_size, 6_000) > 12
