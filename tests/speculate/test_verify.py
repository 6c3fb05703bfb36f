"""Which drafts are accepted, against a loop over requests; and the three modes on hand-made logits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.sampling.logprobs import unpack_logprobs
from slipstream.sampling.mask import TokenMasks
from slipstream.sampling.operation import Positions
from slipstream.sampling.sampler import SamplingNeeds
from slipstream.speculate.synthetic import force_acceptance
from slipstream.speculate.verify import Drafted, Verifier, accept_drafts
from slipstream.speculative_config import SpeculativeConfig, VerifyMode
from tests.sampling.rows import make_request, make_rows


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_equals_a_loop_over_requests(data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 5))
    counts = data.draw(st.lists(st.integers(0, width), min_size=1, max_size=6))
    total = sum(counts) + data.draw(st.integers(0 if sum(counts) else 1, 3))

    def draw(low: int, high: int) -> list[int]:
        return [data.draw(st.integers(low, high)) for _ in range(total)]

    target, drafts, forced = draw(0, 2), draw(-1, 2), draw(0, 1)
    failed = [n == 0 for n in draw(0, 6)]
    by_flags = data.draw(st.booleans())
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    found = accept_drafts(
        torch.tensor(target, dtype=torch.int64),
        torch.tensor(drafts, dtype=torch.int32),
        torch.tensor(forced, dtype=torch.bool) if by_flags else None,
        torch.tensor(failed, dtype=torch.bool),
        starts,
        width,
    )
    for i, count in enumerate(counts):
        at, taken = int(starts[i]), []
        for j in range(count):
            is_accepted = bool(forced[at + j]) if by_flags else drafts[at + j] == target[at + j]
            if drafts[at + j] < 0 or failed[at + j] or not is_accepted:
                break
            taken.append(drafts[at + j])
        assert found[1][i] == len(taken)
        assert found[0][i, : len(taken)].tolist() == taken
        if len(taken) < count:
            assert found[0][i, len(taken)] == target[at + len(taken)]
            assert bool(found[2][i]) == failed[at + len(taken)]
        if not count:
            assert not found[2][i], "padding does not fail"


def drafted(position: int, drafts: list[int], num_places: int) -> Drafted:
    """One request in row 0 with some drafts, and unused draft slots after them."""
    idx = torch.arange(num_places + 1, dtype=torch.int32)
    ids = torch.tensor([*drafts, *[-1] * (num_places + 1 - len(drafts))], dtype=torch.int32)
    at = Positions(torch.zeros_like(idx), position + idx.clamp(max=len(drafts)))
    return Drafted(at, ids, torch.tensor([0, num_places + 1], dtype=torch.int32))


def certain(*token_ids: int) -> torch.Tensor:
    logits = torch.zeros(len(token_ids), 8)
    logits[range(len(token_ids)), list(token_ids)] = 90.0
    return logits


@pytest.mark.parametrize("mode", ["match", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("drafts", "accepted"), [([3, 5, 6], 3), ([3, 5, 1], 2), ([3, 1, 6], 1), ([1, 5, 6], 0), ([3, 5], 2), ([], 0)]
)
def test_drafts_stand_while_they_are_what_the_target_takes(
    mode: VerifyMode, temperature: float, drafts: list[int], accepted: int
) -> None:
    request = make_request([1, 2], temperature=temperature)
    rows, _, needs = make_rows([request], [[1, 2]])
    verifier = Verifier(SpeculativeConfig("ngram", 3, mode), 1, torch.tensor([2, 0], dtype=torch.int32))
    wanted = [3, 5, 6, 7]
    found = verifier.verify(certain(*wanted), rows, drafted(2, drafts, 3), needs)
    assert found.tokens.num_accepted.tolist() == [accepted]
    assert found.tokens.new_ids[0, : accepted + 1].tolist() == wanted[: accepted + 1]
    assert found.tokens.failed.tolist() == [False]


@pytest.mark.parametrize("mode", ["match", "rejection"])
@pytest.mark.parametrize(("bad", "accepted", "failed"), [(0, 0, True), (2, 2, True), (3, 3, True)])
def test_no_draft_stands_on_logits_that_are_no_numbers(mode: VerifyMode, bad: int, accepted: int, failed: bool) -> None:
    rows, _, _ = make_rows([make_request([1, 2])], [[1, 2]])
    verifier = Verifier(SpeculativeConfig("ngram", 3, mode), 1, torch.tensor([2, 0], dtype=torch.int32))
    logits = certain(3, 5, 6, 7)
    logits[bad, 2] = math.nan
    found = verifier.verify(logits, rows, drafted(2, [3, 5, 6], 3), SamplingNeeds())
    assert (found.tokens.num_accepted.tolist(), found.tokens.failed.tolist()) == ([accepted], [failed])


@pytest.mark.parametrize("mode", ["match", "rejection", "synthetic"])
@pytest.mark.parametrize("bad", [False, True])
def test_without_draft_slots_the_same_token_is_taken(mode: VerifyMode, bad: bool) -> None:
    request = make_request([1, 2], temperature=1.0)
    rows, _, needs = make_rows([request], [[1, 2]])
    rates = (1.0, 1.0, 1.0) if mode == "synthetic" else ()
    config = SpeculativeConfig("ngram", 3, mode, acceptance_rates=rates)
    verifier = Verifier(config, 1, torch.tensor([2, 0], dtype=torch.int32))
    logits = torch.randn(1, 8, generator=torch.Generator().manual_seed(7))
    logits[0, 2] = math.nan if bad else 0.0
    no_drafts = drafted(2, [], 0)
    expected = verifier.verify(logits, rows, no_drafts, needs)
    found = verifier.verify(logits, rows, no_drafts._replace(are_none=True), needs)
    assert found.tokens.new_ids[:, :1].tolist() == expected.tokens.new_ids[:, :1].tolist()
    assert (found.tokens.num_accepted.tolist(), found.tokens.failed.tolist()) == ([0], [bad])
    assert (expected.tokens.num_accepted.tolist(), expected.tokens.failed.tolist()) == ([0], [bad])


def test_bad_logits_after_a_rejected_draft_are_ignored() -> None:
    rows, _, _ = make_rows([make_request([1, 2])], [[1, 2]])
    verifier = Verifier(SpeculativeConfig("ngram", 3), 1, torch.tensor([2, 0], dtype=torch.int32))
    logits = certain(3, 5, 6, 7)
    logits[2:] = math.nan
    found = verifier.verify(logits, rows, drafted(2, [3, 1, 6], 3), SamplingNeeds())
    assert (found.tokens.num_accepted.tolist(), found.tokens.failed.tolist()) == ([1], [False])
    assert found.tokens.new_ids[0, :2].tolist() == [3, 5]


def test_forced_acceptance_comes_at_the_given_rates() -> None:
    """Entry i of the rates is the share of steps in which the first i + 1 drafts are all accepted."""
    rates, trials = [0.73, 0.521, 0.355], 40_000
    num_tokens = torch.arange(trials, dtype=torch.int32)
    rows = torch.arange(trials, dtype=torch.int32).repeat_interleave(4)
    positions = num_tokens[rows] + torch.arange(4, dtype=torch.int32).repeat(trials)
    seeds = torch.randint(-(2**31), 2**31, (trials, 2), generator=torch.Generator().manual_seed(0)).int()
    flags = force_acceptance(rows, positions, num_tokens, seeds, num_tokens * 0, torch.tensor(rates)).view(trials, 4)
    leading = flags.int().cumprod(1)
    assert not flags[:, 3].any()
    for i, rate in enumerate(rates):
        sigma = math.sqrt(rate * (1 - rate) / trials)
        assert abs(leading[:, i].double().mean() - rate) < 5 * sigma


def test_forced_drafts_stand_whatever_they_say() -> None:
    rows, _, needs = make_rows([make_request([1, 2])], [[1, 2]])
    config = SpeculativeConfig("ngram", 3, "synthetic", acceptance_rates=(1.0, 1.0, 0.0))
    verifier = Verifier(config, 1, torch.tensor([2, 0], dtype=torch.int32))
    found = verifier.verify(certain(3, 5, 6, 7), rows, drafted(2, [0, 0, 0], 3), needs)
    assert found.tokens.num_accepted.tolist() == [2]
    assert found.tokens.new_ids[0, :3].tolist() == [0, 0, 6]
    # A missing draft is not accepted.
    found = verifier.verify(certain(3, 5, 6, 7), rows, drafted(2, [0], 3), needs)
    assert found.tokens.num_accepted.tolist() == [1]


@pytest.mark.parametrize("mode", ["match", "rejection"])
def test_the_mask_acts_at_each_position(mode: VerifyMode) -> None:
    rows, _, needs = make_rows([make_request([1, 2])], [[1, 2]])
    verifier = Verifier(SpeculativeConfig("ngram", 3, mode), 1, torch.tensor([2, 0], dtype=torch.int32))
    mask = torch.full((4, 1), -1, dtype=torch.int32)
    mask[1, 0] = 0b10  # after the first draft only token 1 is allowed
    found = verifier.verify(
        certain(3, 5, 6, 7), rows, drafted(2, [3, 5, 6], 3), needs, TokenMasks(mask, torch.arange(4, dtype=torch.int32))
    )
    assert found.tokens.num_accepted.tolist() == [1]
    assert found.tokens.new_ids[0, :2].tolist() == [3, 1]


@pytest.mark.parametrize("mode", ["match", "rejection"])
def test_penalties_and_bad_words_see_the_drafts_before_a_position(mode: VerifyMode) -> None:
    """The row's tokens are 1, 2; the drafts 3 and 5 follow them in the row."""
    request = make_request([1, 2], bad_word_ids=((3, 6),), frequency_penalty=2.0)
    rows, _, needs = make_rows([request], [[1, 2, 3, 5]])
    verifier = Verifier(SpeculativeConfig("ngram", 2, mode), 1, torch.tensor([2, 0], dtype=torch.int32))
    logits = torch.zeros(3, 8)
    logits[0, 3], logits[1, 6], logits[1, 5] = 9.0, 9.0, 8.0  # after 3 the bad word forbids 6
    logits[2, 5], logits[2, 7] = 9.0, 7.5  # 5 is once in the output: 9 - 2 < 7.5
    found = verifier.verify(logits, rows, drafted(2, [3, 5], 2), needs)
    assert found.tokens.new_ids.tolist() == [[3, 5, 7]]


@pytest.mark.parametrize("mode", ["match", "rejection"])
def test_log_probabilities_are_the_targets_of_the_tokens_taken(mode: VerifyMode) -> None:
    rows, _, needs = make_rows([make_request([1, 2], logprobs=2)], [[1, 2, 3, 5, 6]])
    verifier = Verifier(SpeculativeConfig("ngram", 3, mode), 1, torch.tensor([2, 0], dtype=torch.int32))
    found = verifier.verify(certain(3, 5, 6, 7), rows, drafted(2, [3, 5, 1], 3), needs)
    assert found.logprobs is not None
    assert found.logprobs[:3, 1].tolist() == [3, 5, 6]


@pytest.mark.parametrize("mode", ["match", "rejection"])
def test_log_probabilities_are_the_models_own_whatever_the_request_draws_from(mode: VerifyMode) -> None:
    """Neither bias nor temperature nor a cut of the distribution is in them, as without drafts."""
    drawn = {"logit_bias": {3: 60.0, 5: 59.0}, "temperature": 0.5, "top_k": 1, "repetition_penalty": 1.5}
    rows, _, needs = make_rows([make_request([1, 2], logprobs=2, **drawn)], [[1, 2, 3]])
    verifier = Verifier(SpeculativeConfig("ngram", 1, mode), 1, torch.tensor([2, 0], dtype=torch.int32))
    logits = torch.linspace(0.0, 3.5, 16).view(2, 8)
    found = verifier.verify(logits, rows, drafted(2, [3], 1), needs)
    assert found.tokens.new_ids.tolist() == [[3, 5]] and found.tokens.num_accepted.tolist() == [1]
    assert found.logprobs is not None
    expected = logits.double().log_softmax(1)
    for row, token_id, own in zip(unpack_logprobs(found.logprobs.numpy()), (3, 5), expected, strict=True):
        assert row.token_ids[:3] == [token_id, 7, 6]
        assert row.values[:3] == pytest.approx(own[[token_id, 7, 6]].tolist(), abs=1e-5)
        assert row.rank == 8 - token_id


def test_log_probabilities_of_forced_drafts_are_those_of_the_tokens_taken() -> None:
    """Where no draft is there, acceptance cannot be forced, and the token is the target's own."""
    rows, _, needs = make_rows([make_request([1, 2], logprobs=1)], [[1, 2, 0]])
    config = SpeculativeConfig("ngram", 3, "synthetic", acceptance_rates=(1.0, 1.0, 1.0))
    verifier = Verifier(config, 1, torch.tensor([2, 0], dtype=torch.int32))
    found = verifier.verify(certain(3, 5, 6, 7), rows, drafted(2, [0], 3), needs)
    assert found.tokens.new_ids[0, :2].tolist() == [0, 5]
    assert found.logprobs is not None
    assert [row.token_ids[0] for row in unpack_logprobs(found.logprobs.numpy())[:2]] == [0, 5]
