"""Every sampling parameter, alone and in combination, against the logits processors of ``transformers`` or numpy."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from slipstream.request import Request
from slipstream.sampling.gumbel import gumbel_noise
from slipstream.sampling.logprobs import unpack_logprobs
from slipstream.sampling.mask import TokenMasks, apply_mask
from slipstream.sampling.min_p import apply_min_p
from slipstream.sampling.operation import Positions, SamplingOperation
from slipstream.sampling.registry import operations
from slipstream.sampling.sampler import NOISE_ALONE, SamplingNeeds, process, sample
from tests.sampling.rows import make_request, make_rows

VOCAB = 60
PARAMETERS: dict[str, list[Any]] = {
    "temperature": [0.0, 0.7, 1.5],
    "top_n_sigma": [0.0, 0.5, 2.0],
    "top_k": [0, 1, 7],
    "top_p": [1.0, 0.6, 0.9, 0.99],
    "min_p": [0.0, 0.05, 0.3],
    "repetition_penalty": [1.0, 1.3, 0.8],
    "frequency_penalty": [0.0, 0.5, -1.0],
    "presence_penalty": [0.0, 1.5],
    "logit_bias": [None, {3: 5.0, 59: -100.0, 0: 1.0}],
    "min_tokens": [0, 4],
    "bad_words": [(), ((5,), (1, 2), (7, 7, 9))],
}


def expected_logits(logits: torch.Tensor, request: Request, history: list[int]) -> torch.Tensor:
    """One row, in float64: numpy for what transformers has no processor for, its processors for the rest."""
    params = request.params
    row = logits.double().numpy().copy()
    for token_id, value in (params.logit_bias or {}).items():
        row[token_id] += value
    ids, scores = torch.tensor([history]), torch.from_numpy(row)[None]
    if request.bad_word_ids:
        scores = NoBadWordsLogitsProcessor([list(w) for w in request.bad_word_ids], eos_token_id=[10**6])(ids, scores)
    outputs = history[len(request.prompt_token_ids) :]
    if len(outputs) < params.min_tokens:
        scores[:, list(request.stop_token_ids)] = -torch.inf
    if params.repetition_penalty != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    counts = torch.from_numpy(np.bincount(outputs, minlength=VOCAB))
    scores = scores - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    if not params.temperature:
        return scores[0]
    if params.top_n_sigma:
        allowed = scores[torch.isfinite(scores)].numpy()
        scores = scores.masked_fill(scores < allowed.max() - params.top_n_sigma * np.std(allowed), -torch.inf)
    steps = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    steps += [TopKLogitsWarper(params.top_k)] if params.top_k else []
    steps += [TopPLogitsWarper(params.top_p)] if params.top_p < 1.0 else []
    steps += [MinPLogitsWarper(params.min_p)] if params.min_p else []
    return steps(ids, scores)[0]


def random_request(rng: random.Random, names: list[str]) -> tuple[Request, list[int]]:
    chosen = {name: rng.choice(PARAMETERS[name]) for name in names}
    words = chosen.pop("bad_words", ())
    prompt = [rng.randrange(12) for _ in range(rng.randint(1, 10))]
    history = prompt + [rng.randrange(12) for _ in range(rng.randint(0, 9))]
    return make_request(prompt, words, stop_token_ids=(0, 2, 11), **{"temperature": 0.0, **chosen}), history


def check(cases: list[tuple[Request, list[int]]], seed: int) -> None:
    logits = torch.randn(len(cases), VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 3
    rows, at, needs = make_rows([c[0] for c in cases], [c[1] for c in cases])
    noise = gumbel_noise(rows.seeds[at.rows], at.positions, rows.choice[at.rows], VOCAB)
    found = process(logits, rows, at, needs)
    token_ids = sample(logits, rows, at, needs).token_ids
    for i, (request, history) in enumerate(cases):
        expected = expected_logits(logits[i], request, history)
        assert token_ids[i] == (expected + noise[i] * bool(request.params.temperature)).argmax()
        if not request.params.temperature:
            continue  # a greedy row may be cut by top-k and its like, which does not touch its argmax
        assert torch.equal(torch.isfinite(found[i]), torch.isfinite(expected)), request.params
        torch.testing.assert_close(found[i], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", PARAMETERS)
def test_each_parameter_alone(name: str) -> None:
    rng = random.Random(name)
    names = [name] if name == "temperature" else [name, "temperature"]
    for seed in range(5):
        check([random_request(rng, names) for _ in range(6)], seed)


def test_all_parameters_in_any_combination() -> None:
    rng = random.Random(0)
    for seed in range(60):
        names = rng.sample(list(PARAMETERS), rng.randint(2, len(PARAMETERS)))
        check([random_request(rng, names) for _ in range(rng.randint(1, 8))], seed)


def test_a_row_does_not_feel_its_neighbours() -> None:
    rng = random.Random(3)
    cases = [random_request(rng, list(PARAMETERS)) for _ in range(8)]
    logits = torch.randn(8, VOCAB, dtype=torch.float64)
    rows, at, needs = make_rows([c[0] for c in cases], [c[1] for c in cases])
    together = sample(logits, rows, at, needs)
    for i in range(8):
        own = Positions(*(part[i : i + 1] for part in at))
        alone = sample(logits[i : i + 1], rows, own, SamplingNeeds.for_request(cases[i][0]))
        assert alone.token_ids[0] == together.token_ids[i]


def test_a_row_is_its_requests_alone_whichever_had_it_before() -> None:
    """What the previous one has left in it, such as a longer list of biases or bad words, has no effect, even where a
    neighbour makes the step look at every parameter."""
    rng, needs = random.Random(4), SamplingNeeds(frozenset(o.name for o in operations()))
    for seed in range(20):
        before, (request, history) = (random_request(rng, list(PARAMETERS)) for _ in range(2))
        logits = torch.randn(1, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        found = []
        for by in (None, before):
            rows, at, _ = make_rows([request], [history], by)
            found.append(process(logits, rows, at, needs))
        assert torch.equal(*found), request.params


def test_the_mask_decides_what_may_stand_at_a_position() -> None:
    request = make_request([1, 2])
    rows, at, needs = make_rows([request], [[1, 2]])
    logits = torch.arange(VOCAB, dtype=torch.float64)[None]
    mask = torch.zeros(1, 2, dtype=torch.int32)
    mask[0, 1] = 1 << 3  # token 35
    mask[0, 0] = -(2**31)  # token 31, the sign bit
    assert sample(logits, rows, at, needs, TokenMasks(mask, at.rows)).token_ids.tolist() == [35]
    mask[0, 1] = 0
    assert sample(logits, rows, at, needs, TokenMasks(mask, at.rows)).token_ids.tolist() == [31]


def test_a_batch_runs_what_it_needs_alone() -> None:
    """What no request of a batch asks for costs nothing, and what one asks for is run in order."""
    request = make_request([1, 2], temperature=1.0, top_p=0.9, presence_penalty=0.5)
    rows, at, needs = make_rows([request], [[1, 2, 3]])
    ran: list[str] = []

    def noted(operation: SamplingOperation) -> SamplingOperation:
        def apply(logits: torch.Tensor, *args: Any) -> torch.Tensor:
            ran.append(operation.name)
            return operation.apply(logits, *args)

        return replace(operation, apply=apply)

    rows = replace(rows, operations=tuple(map(noted, rows.operations)))
    sample(torch.randn(1, VOCAB), rows, at, needs)
    assert ran == ["penalties", "temperature", "top_p"]
    sample(torch.randn(1, VOCAB), rows, at, NOISE_ALONE)
    assert len(ran) == 3, "the draw divides by the temperature itself"


def test_a_greedy_batch_needs_nothing() -> None:
    assert SamplingNeeds.for_request(make_request([1], top_k=5, top_p=0.5, min_p=0.1)) == SamplingNeeds()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("top_n_sigma", 99.0),
            ("top_k", 1),
            ("top_p", 0.999),
            ("min_p", 0.001),
            ("logit_bias", {5: 0.01}),
            ("min_tokens", 1),
        ),
        *(("repetition_penalty", 0.999), ("frequency_penalty", -0.01), ("presence_penalty", 0.01), ("logprobs", 0)),
    ],
)
def test_a_parameter_that_is_hardly_on_is_on(name: str, value: Any) -> None:
    """Nothing else of the batch would make the step look at it."""
    kind = "penalties" if name.endswith("_penalty") else name
    request = make_request([1], temperature=0.01, **{name: value})
    needed = SamplingNeeds.for_request(request)
    assert needed.operations == {"temperature", kind} - {"logprobs"}
    assert needed.noise and needed.logprobs == (kind == "logprobs")


def test_a_history_shorter_than_a_bad_word_does_not_complete_it() -> None:
    request = make_request([1], bad_word_ids=((1, 1, 5),))
    rows, at, needs = make_rows([request], [[1]])
    logits = torch.zeros(1, VOCAB, dtype=torch.float64)
    logits[0, 5] = 1.0
    assert sample(logits, rows, at, needs).token_ids.tolist() == [5]
    rows, at, needs = make_rows([request], [[1, 1]])
    assert sample(logits, rows, at, needs).token_ids.tolist() != [5]


def test_min_p_of_one_keeps_exactly_the_likeliest() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    kept = torch.isfinite(apply_min_p(logits, torch.ones(1)))
    assert kept.tolist() == [[False, True, True, False]]


def test_masks_of_a_pool_in_float32_are_those_in_float64() -> None:
    """In float32 a CPU may run C; sizes that are no multiple of 32, rows without a mask, and the sign bit."""
    generator = torch.Generator().manual_seed(4)
    for size in (1, 31, 32, 70, 513):
        logits = torch.randn(4, size, generator=generator)
        pool = torch.randint(-(2**31), 2**31, (5, -(-size // 32)), generator=generator).int()
        masks = TokenMasks(pool, torch.tensor([4, -1, 0, 4], dtype=torch.int32))
        found = apply_mask(logits, masks)
        assert torch.equal(found.double(), apply_mask(logits.double(), masks))
        assert torch.equal(found[1], logits[1])


def test_log_probabilities_are_those_of_the_masked_distribution() -> None:
    request = make_request([1, 2], logprobs=2)
    rows, at, needs = make_rows([request], [[1, 2]])
    logits = torch.arange(VOCAB, dtype=torch.float64)[None] / 10
    allowed = [3, 17, 40]
    mask = torch.tensor([[1 << 3 | 1 << 17, 1 << 8]], dtype=torch.int32)
    found = sample(logits, rows, at, needs, TokenMasks(mask, torch.zeros(1, dtype=torch.int32)))
    assert found.logprobs is not None and found.token_ids.tolist() == [40]
    (row,) = unpack_logprobs(found.logprobs.numpy())
    expected = logits[0, allowed].log_softmax(0).tolist()
    assert row.token_ids[:4] == [40, 40, 17, 3]
    assert row.values[:4] == pytest.approx([expected[2], expected[2], expected[1], expected[0]], rel=1e-6)
