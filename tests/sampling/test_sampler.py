from __future__ import annotations

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from slipstream.sampling.gumbel import gumbel_noise
from slipstream.sampling.sampler import SamplingNeeds, SamplingRows, sample
from slipstream.types import SamplingParams


def test_rows_are_processed_as_transformers_does() -> None:
    """Temperature, then top-k, then top-p, each by its row's parameters, in any mix."""
    torch.manual_seed(0)
    settings = [(0.0, 0, 1.0), (0.7, 0, 1.0), (1.3, 5, 1.0), (0.9, 0, 0.6), (2.0, 20, 0.8), (0.0, 7, 0.3)]
    n, vocab = len(settings), 100
    rows = SamplingRows(
        temperature=torch.tensor([s[0] for s in settings]),
        top_k=torch.tensor([s[1] for s in settings], dtype=torch.int32),
        top_p=torch.tensor([s[2] for s in settings]),
        seeds=torch.randint(0, 1000, (n, 2), dtype=torch.int32),
        num_tokens=torch.arange(10, 10 + n, dtype=torch.int32),
    )
    batch_rows = torch.tensor([4, 0, 5, 1, 3, 2], dtype=torch.int32)
    needs = SamplingNeeds()
    for temperature, top_k, top_p in settings:
        needs |= SamplingNeeds.of(SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p))
    logits = torch.randn(n, vocab) * 4
    ids, failed = sample(logits, rows, batch_rows, needs)

    noise = gumbel_noise(rows.seeds, rows.num_tokens, vocab)
    for i, row in enumerate(batch_rows.tolist()):
        temperature, top_k, top_p = settings[row]
        expected = logits[i : i + 1]
        if temperature:
            steps = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
            steps += [TopKLogitsWarper(top_k)] if top_k else []
            steps += [TopPLogitsWarper(top_p)] if top_p < 1 else []
            expected = steps(torch.empty(0), expected) + noise[row]
        assert int(ids[i]) == int(expected.argmax())
    assert not failed.any()


def test_a_greedy_batch_needs_nothing() -> None:
    assert SamplingNeeds.of(SamplingParams(temperature=0.0, top_k=5, top_p=0.5)) == SamplingNeeds()
